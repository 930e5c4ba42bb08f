// Owns what the kernels' tasks run on: the loop that shares them out, and their memory.

#include <cstdlib>

namespace jax_flash::cpu {
namespace {

template <class Body>
void ForEach(Workers& workers, int64_t tasks, Body body) {
  workers.Run(tasks, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Hands out 64-byte aligned pieces of one allocation; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class X>
  X* Take(int64_t count) {
    const int64_t at = used_;
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(X)), 64);
    return base_ ? reinterpret_cast<X*>(base_ + at) : nullptr;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Gives to all that place(arena) takes the scratch memory of the calling thread. False without it.
template <class Place>
bool PlaceInScratch(Place place) {
  Arena count(nullptr);
  place(count);
  void* memory = ThreadScratch(count.used());
  if (!memory) return false;
  Arena arena(memory);
  place(arena);
  return true;
}

// Memory of a task.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : data_(std::aligned_alloc(64, static_cast<size_t>(RoundUp(Most(bytes, 1), 64)))) {}
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class X>
  X* get() const {
    return static_cast<X*>(data_);
  }

 private:
  void* data_;
};

}  // namespace
}  // namespace jax_flash::cpu

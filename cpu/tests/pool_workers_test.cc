// Loops on pools that refuse helpers: every index is visited once, and Run returns.

#include "cpu/pool_workers.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace jax_flash::cpu {
namespace {

// Takes `capacity` tasks, each on a thread of its own, and throws at the next.
struct Pool {
  struct State {
    int capacity;
    std::vector<std::thread> threads;
    int refused = 0;
  };
  State* state;

  template <class F>
  void Schedule(F&& task) {
    if (static_cast<int>(state->threads.size()) == state->capacity) {
      ++state->refused;
      throw std::bad_alloc();
    }
    state->threads.emplace_back(std::function<void()>(task));
  }
};

bool Check(int capacity, int64_t threads, int64_t tasks) {
  Pool::State state{capacity, {}};
  std::vector<std::atomic<int>> visits(static_cast<size_t>(tasks));
  PoolWorkers<Pool> workers(Pool{&state}, threads);
  workers.Run(
      tasks,
      [](void* context, int64_t i) {
        ++(*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<size_t>(i)];
      },
      &visits);
  bool right = true;
  for (const auto& count : visits) right = right && count == 1;
  for (std::thread& thread : state.threads) thread.join();
  const int64_t helpers = std::min(threads, tasks) - 1;
  right = right && state.refused == (helpers > capacity ? 1 : 0);
  if (!right) std::printf("capacity %d, %d threads: wrong\n", capacity, static_cast<int>(threads));
  return right;
}

}  // namespace
}  // namespace jax_flash::cpu

int main() {
  bool right = true;
  for (int capacity : {0, 1, 3, 100}) {
    for (int64_t threads : {0, 1, 2, 5}) {
      for (int64_t tasks : {0, 1, 2, 1000}) {
        right = jax_flash::cpu::Check(capacity, threads, tasks) && right;
      }
    }
  }
  return right ? 0 : 1;
}

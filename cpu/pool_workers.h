// Owns how a loop is shared with the threads of a pool. Knows no XLA: Pool is anything with
// Schedule(task), for a task that is copied, called once at most, and takes nothing.
#ifndef JAX_FLASH_CPU_POOL_WORKERS_H_
#define JAX_FLASH_CPU_POOL_WORKERS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cpu/attention.h"

namespace jax_flash::cpu {

// The caller and helpers on the pool draw from one counter. The caller waits only for helpers that
// have drawn a task, so a pool that never gets to the others, or refuses them, cannot hold it up.
template <class Pool>
class PoolWorkers : public Workers {
 public:
  PoolWorkers(Pool pool, int64_t threads) : pool_(pool), count_(threads) {}

  int64_t count() const override { return std::max<int64_t>(1, count_); }

  void Run(int64_t tasks, void (*body)(void*, int64_t), void* context) override {
    const int64_t helpers = std::min(count(), tasks) - 1;
    std::shared_ptr<Loop> loop;  // outlives this call in helpers that start late
    try {
      if (helpers > 0) loop = std::make_shared<Loop>(tasks, body, context);
      for (int64_t i = 0; i < helpers; ++i) {
        pool_.Schedule([loop] { loop->Drain(); });
      }
    } catch (...) {
      // No memory for one more helper: those that are there do the work.
    }
    if (!loop) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return;
    }
    loop->Drain();
    std::unique_lock<std::mutex> lock(loop->mutex);
    loop->all_done.wait(lock, [&] { return loop->done == tasks; });
  }

 private:
  struct Loop {
    const int64_t tasks;
    void (*const body)(void*, int64_t);
    void* const context;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;

    Loop(int64_t tasks, void (*body)(void*, int64_t), void* context)
        : tasks(tasks), body(body), context(context) {}

    void Drain() {
      int64_t mine = 0;
      for (int64_t i = next++; i < tasks; i = next++, ++mine) body(context, i);
      if (mine == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      done += mine;
      if (done == tasks) all_done.notify_one();
    }
  };

  Pool pool_;
  int64_t count_;
};

}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_POOL_WORKERS_H_

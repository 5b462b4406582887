#include "inference_worker/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace promptcache::worker::cpu {
namespace {

TEST(ThreadPoolTest, RunsEveryTaskOnceWithAThreadIndexInRange) {
  for (uint32_t threads : {1u, 2u, 3u, 5u}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.num_threads(), threads);
    for (size_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<std::atomic<int>> calls(tasks);
      std::atomic<bool> in_range = true;
      pool.ParallelFor(tasks, [&](size_t task, uint32_t thread) {
        calls[task].fetch_add(1, std::memory_order_relaxed);
        if (thread >= threads) in_range = false;
      });
      EXPECT_TRUE(in_range);
      for (size_t i = 0; i < tasks; ++i) EXPECT_EQ(calls[i], 1) << i;
    }
  }
}

TEST(ThreadPoolTest, WhatTasksWroteIsVisibleAfterwards) {
  ThreadPool pool(3);
  std::vector<uint64_t> values(97);  // plain: the pool must synchronise
  for (uint64_t round = 1; round <= 2000; ++round) {
    pool.ParallelFor(values.size(),
                     [&](size_t task, uint32_t) { values[task] += task; });
  }
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], 2000 * i);
}

TEST(ThreadPoolTest, WorksAfterWorkersParked) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::atomic<size_t> sum = 0;
    pool.ParallelFor(100, [&](size_t task, uint32_t) { sum += task; });
    EXPECT_EQ(sum, 4950u);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(ThreadPoolTest, AnotherThreadTakesTheShareOfABusyOne) {
  ThreadPool pool(2);
  // Whichever thread takes task 0 stays in it until all others are done, its
  // own share included.
  std::atomic<int> done = 0;
  bool others_done = false;
  pool.ParallelFor(10, [&](size_t task, uint32_t) {
    if (task > 0) {
      ++done;
      return;
    }
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (done < 9 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    others_done = done == 9;
  });
  EXPECT_TRUE(others_done);
}

TEST(ThreadPoolTest, ManyPoolsStartAndStop) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool pool(4);
    if (i % 2 == 0) continue;
    std::atomic<int> calls = 0;
    pool.ParallelFor(8, [&](size_t, uint32_t) { ++calls; });
    EXPECT_EQ(calls, 8);
  }
}

TEST(ThreadPoolDeathTest, RegionsDoNotNest) {
  ThreadPool pool(1);
  EXPECT_DEATH(pool.ParallelFor(1,
                                [&](size_t, uint32_t) {
                                  pool.ParallelFor(1, [](size_t, uint32_t) {});
                                }),
               "do not nest");
}

}  // namespace
}  // namespace promptcache::worker::cpu

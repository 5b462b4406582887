#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

#if defined(__SANITIZE_THREAD__)
#define PROMPTCACHE_STD_MUTEX 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PROMPTCACHE_STD_MUTEX 1
#endif
#endif

#ifdef PROMPTCACHE_STD_MUTEX
#include <chrono>
#include <condition_variable>
#include <mutex>
#else
#include "absl/synchronization/mutex.h"
#endif

namespace promptcache {

// absl's mutex under the project's names; std's under TSan, which cannot see
// into Debian's uninstrumented libabsl and reports races that do not exist.
// Thread-safe. Not recursive.
class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { unlock(); }
  // For the analysis only, where it cannot see who calls (a lambda).
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

 private:
  friend class CondVar;
#ifdef PROMPTCACHE_STD_MUTEX
  void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.lock(); }
  void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.unlock(); }
  std::mutex mu_;
#else
  void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Lock(); }
  void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Unlock(); }
  absl::Mutex mu_;
#endif
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) {
    mu_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mu_;
};

// Waits may wake spuriously: always wait in a loop over the condition.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex* mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
#ifdef PROMPTCACHE_STD_MUTEX
    std::unique_lock<std::mutex> lock(mu->mu_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
#else
    cv_.Wait(&mu->mu_);
#endif
  }

  // Returns true when `timeout` passed without a wake-up.
  bool WaitWithTimeout(Mutex* mu, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
#ifdef PROMPTCACHE_STD_MUTEX
    std::unique_lock<std::mutex> lock(mu->mu_, std::adopt_lock);
    const bool timed_out =
        cv_.wait_for(lock, absl::ToChronoMicroseconds(timeout)) ==
        std::cv_status::timeout;
    lock.release();
    return timed_out;
#else
    return cv_.WaitWithTimeout(&mu->mu_, timeout);
#endif
  }

  void Signal() {
#ifdef PROMPTCACHE_STD_MUTEX
    cv_.notify_one();
#else
    cv_.Signal();
#endif
  }

  void SignalAll() {
#ifdef PROMPTCACHE_STD_MUTEX
    cv_.notify_all();
#else
    cv_.SignalAll();
#endif
  }

 private:
#ifdef PROMPTCACHE_STD_MUTEX
  std::condition_variable cv_;
#else
  absl::CondVar cv_;
#endif
};

}  // namespace promptcache

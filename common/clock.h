#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace promptcache {

// The time of day, behind an interface so that tests own it (FakeClock in
// tests/support). Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
};

}  // namespace promptcache

#include "inference_worker/serving/leased_arrival.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace promptcache::worker {
namespace {

// Says what it is told to, one after the other; the last again and again.
class ScriptedLease final : public CacheLease {
 public:
  ScriptedLease(std::vector<ModuleProgress> script, bool valid)
      : script_(std::move(script)), valid_(valid) {}
  const std::vector<AcquiredModule>& modules() const override {
    return modules_;
  }
  absl::Status WaitPending(size_t, absl::Time) override { return {}; }
  absl::StatusOr<std::vector<bool>> Commit(const std::vector<CommitModule>&,
                                           absl::Time) override {
    return std::vector<bool>();
  }
  void Abort(const std::vector<uint64_t>&) override {}
  bool Valid(size_t) const override { return valid_; }
  ModuleProgress Progress(size_t) const override {
    const ModuleProgress now = script_[std::min(asked_, script_.size() - 1)];
    ++asked_;
    return now;
  }
  void ReportCorruption(size_t) override {}
  size_t asked() const { return asked_; }

 private:
  const std::vector<AcquiredModule> modules_;
  const std::vector<ModuleProgress> script_;
  const bool valid_;
  mutable size_t asked_ = 0;
};

constexpr ModuleProgress At(uint32_t layers) {
  return {.num_layers = layers, .ended = false};
}
absl::Time Later() { return absl::Now() + absl::Seconds(30); }

TEST(LeasedArrivalTest, WaitsForTheLayersAskedForAndNoMore) {
  const ScriptedLease lease({At(0), At(2), At(4), {}}, /*valid=*/true);
  LeasedArrival arrival(&lease, 0, Later());
  EXPECT_TRUE(arrival.AwaitLayers(1));
  EXPECT_EQ(lease.asked(), 2u);
  EXPECT_TRUE(arrival.AwaitLayers(1));
  EXPECT_EQ(lease.asked(), 2u);
  EXPECT_TRUE(arrival.AwaitLayers(3));
  EXPECT_EQ(lease.asked(), 3u);
  EXPECT_TRUE(arrival.AwaitVerified());
  EXPECT_GT(arrival.waited(), absl::ZeroDuration());
}

TEST(LeasedArrivalTest, AnEndThatIsNotValidIsFalseForGood) {
  const ScriptedLease lease({At(1), {}}, /*valid=*/false);
  LeasedArrival arrival(&lease, 0, Later());
  EXPECT_TRUE(arrival.AwaitLayers(1));
  EXPECT_FALSE(arrival.AwaitLayers(2));
  const size_t asked = lease.asked();
  EXPECT_FALSE(arrival.AwaitLayers(3));
  EXPECT_FALSE(arrival.AwaitVerified());
  EXPECT_EQ(lease.asked(), asked);
}

TEST(LeasedArrivalTest, AllLayersAreNotEnoughToBeVerified) {
  const ScriptedLease lease({At(4)}, /*valid=*/true);
  LeasedArrival arrival(&lease, 0, absl::Now());
  EXPECT_TRUE(arrival.AwaitLayers(4));
  EXPECT_FALSE(arrival.AwaitVerified());
}

TEST(LeasedArrivalTest, TheDeadlineEndsIt) {
  const ScriptedLease lease({At(0)}, /*valid=*/true);
  LeasedArrival arrival(&lease, 0, absl::Now());
  EXPECT_FALSE(arrival.AwaitLayers(1));
}

}  // namespace
}  // namespace promptcache::worker

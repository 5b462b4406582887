#include "tools/cli/policy_flags.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/rpc/duration.h"
#include "tools/cli/cli_status.h"

namespace promptcache::cli {

absl::Status SetTtl(const std::string& text, v1::CachePolicy* policy) {
  absl::Duration ttl;
  if (!absl::ParseDuration(text, &ttl) || ttl <= absl::ZeroDuration() ||
      ttl == absl::InfiniteDuration()) {
    return UsageError(absl::StrCat(
        "\"", text, "\" is not a time to live: write 90s, 10m or 1h30m"));
  }
  rpc::SetDuration(ttl, policy->mutable_ttl());
  return absl::OkStatus();
}

void PolicyFlags::AddTo(CLI::App* command) {
  command->add_option("--ttl", ttl_,
                      "how long modules stay after their last use: 90s, 10m, "
                      "1h30m (the daemon's default otherwise)");
  command->add_flag("--absolute-ttl", absolute_,
                    "count --ttl from the encoding, not from the last use");
  command->add_flag("--pin", pin_, "never evict (within the pin budget)");
}

absl::StatusOr<v1::CachePolicy> PolicyFlags::Policy() const {
  v1::CachePolicy policy;
  if (!ttl_.empty()) {
    if (auto status = SetTtl(ttl_, &policy); !status.ok()) return status;
  }
  policy.set_absolute_ttl(absolute_);
  policy.set_pin(pin_);
  return policy;
}

}  // namespace promptcache::cli

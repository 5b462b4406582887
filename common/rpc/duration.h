#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace promptcache::rpc {

// The longest ttl of a CachePolicy, 100 years: worker and daemon refuse the
// same ones, so that what the worker has let pass does not fail in the daemon,
// where it would take a whole Commit with it.
inline constexpr int64_t kMaxTtlSeconds = int64_t{100} * 366 * 24 * 3600;

// InvalidArgument, naming the field and both numbers, when it is negative, not
// a duration, or longer than kMaxTtlSeconds.
absl::StatusOr<absl::Duration> TtlFromProto(
    const google::protobuf::Duration& proto, const std::string& field);

// REQUIRES: finite.
inline void SetDuration(absl::Duration value,
                        google::protobuf::Duration* proto) {
  absl::Duration rest;
  proto->set_seconds(absl::IDivDuration(value, absl::Seconds(1), &rest));
  proto->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
}

}  // namespace promptcache::rpc

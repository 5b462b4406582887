#include "common/rpc/duration.h"

#include "absl/strings/str_cat.h"
#include "common/rpc/grpc_status.h"

namespace promptcache::rpc {

absl::StatusOr<absl::Duration> TtlFromProto(
    const google::protobuf::Duration& proto, const std::string& field) {
  const int64_t seconds = proto.seconds();
  const int32_t nanos = proto.nanos();
  // No sum of the two: it could be infinite.
  const bool valid =
      seconds >= 0 && nanos >= 0 && nanos < 1'000'000'000 &&
      (seconds < kMaxTtlSeconds || (seconds == kMaxTtlSeconds && nanos == 0));
  if (!valid) {
    return InvalidFieldError(
        field, absl::StrCat(seconds, " s and ", nanos, " ns, must be 0 to ",
                            kMaxTtlSeconds, " s (100 years)"));
  }
  return absl::Seconds(seconds) + absl::Nanoseconds(nanos);
}

}  // namespace promptcache::rpc

#include "tools/cli/proto_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "promptcache/v1/cache.pb.h"
#include "promptcache/v1/schema.pb.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

TEST(ProtoJsonTest, NumbersAreNumbersAndEnumeratorsAreWords) {
  v1::Module module;
  module.set_key("ab");
  module.set_bytes(uint64_t{1} << 40);
  module.set_state(v1::MODULE_STATE_COMMITTED);
  module.set_tier(v1::TIER_DEVICE);
  module.mutable_commit_time()->set_seconds(1);
  const Json json = ToJson(module);
  EXPECT_EQ(json["bytes"], uint64_t{1} << 40);
  EXPECT_TRUE(json["bytes"].is_number());
  EXPECT_EQ(json["state"], "committed");
  EXPECT_EQ(json["tier"], "device");
  EXPECT_EQ(json["absence"], "");
  EXPECT_EQ(json["hits"], 0);
  EXPECT_EQ(json["commit_time"], "1970-01-01T00:00:01+00:00");
  EXPECT_FALSE(json.contains("expire_time"));
}

TEST(ProtoJsonTest, MapsAndDurationsAreReadable) {
  v1::Schema schema;
  v1::CachePolicy& policy = (*schema.mutable_module_policies())["a/b"];
  policy.mutable_ttl()->set_seconds(90);
  policy.mutable_ttl()->set_nanos(500'000'000);
  const Json json = ToJson(schema);
  EXPECT_EQ(json["module_policies"]["a/b"]["ttl"], 90.5);
  EXPECT_EQ(json["module_policies"]["a/b"]["pin"], false);
}

TEST(ProtoJsonTest, RepeatedMessagesAreArrays) {
  v1::CacheStats stats;
  stats.add_tiers()->set_used_bytes(5);
  EXPECT_EQ(ToJson(stats)["tiers"][0]["used_bytes"], 5);
  EXPECT_EQ(ToJson(stats)["misses"], Json::array());
}

}  // namespace
}  // namespace promptcache::cli

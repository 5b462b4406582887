#include "cache_daemon/registry/module_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "cache_daemon/registry/registry.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::daemon {
namespace {

ModuleRecord FullModule() {
  return {
      .key = Sha256Of("key"),
      .schema = "travel",
      .path = "city/sights",
      .isolation_domain = "default",
      .num_tokens = 300,
      .num_bytes = 19 * 16 * 23040,
      .text_sha256 = Sha256Of("text"),
      .context_key = Sha256Of("context"),
      .parts = {1, 2, 3, 4, 5, 6, UINT64_MAX},
      .compute_us = 123456,
      .commit_time = absl::FromUnixSeconds(1'700'000'000),
      .policy = {.ttl = absl::Seconds(90), .absolute_ttl = true, .pin = true}};
}

class ModuleLogTest : public ::testing::Test {
 protected:
  void Open(ModuleLog::Options options = {}) {
    registry_.reset();
    auto opened = Registry::Open(
        {.path = dir_.path() + "/r.db", .module_log = options}, &clock_);
    PC_ASSERT_OK(opened);
    registry_ = *std::move(opened);
  }
  ModuleLog& log() { return registry_->modules(); }
  std::vector<ModuleRecord> Flushed() {
    PC_EXPECT_OK(log().Flush());
    auto modules = registry_->LoadModules();
    PC_EXPECT_OK(modules);
    return modules.ok() ? *modules : std::vector<ModuleRecord>{};
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<Registry> registry_;
};

TEST_F(ModuleLogTest, EveryFieldComesBackAfterARestart) {
  Open();
  const ModuleRecord put = FullModule();
  log().Put(put);
  Open();  // closing writes what is queued
  const auto modules = registry_->LoadModules();
  PC_ASSERT_OK(modules);
  ASSERT_EQ(modules->size(), 1u);
  const ModuleRecord& got = modules->front();
  EXPECT_EQ(got.key, put.key);
  EXPECT_EQ(got.schema, put.schema);
  EXPECT_EQ(got.path, put.path);
  EXPECT_EQ(got.isolation_domain, put.isolation_domain);
  EXPECT_EQ(got.num_tokens, put.num_tokens);
  EXPECT_EQ(got.num_bytes, put.num_bytes);
  EXPECT_EQ(got.text_sha256, put.text_sha256);
  EXPECT_EQ(got.context_key, put.context_key);
  EXPECT_EQ(got.parts, put.parts);
  EXPECT_EQ(got.compute_us, put.compute_us);
  EXPECT_EQ(got.commit_time, put.commit_time);
  EXPECT_EQ(got.policy, put.policy);
}

TEST_F(ModuleLogTest, TheLastChangeOfAModuleWins) {
  Open();
  ModuleRecord module = FullModule();
  log().Put(module);
  module.policy = {};
  module.path = "later";
  log().Put(module);
  ASSERT_EQ(Flushed().size(), 1u);
  EXPECT_EQ(Flushed().front().path, "later");
  EXPECT_EQ(Flushed().front().policy, PolicyRecord{});
}

TEST_F(ModuleLogTest, APinChangesNothingElse) {
  Open();
  ModuleRecord module = FullModule();
  log().Put(module);
  log().SetPin(module.key, false);  // while it is queued
  EXPECT_FALSE(Flushed().front().policy.pin);
  EXPECT_EQ(Flushed().front().path, module.path);
  log().SetPin(module.key, true);
  EXPECT_TRUE(Flushed().front().policy.pin);
  EXPECT_EQ(Flushed().front().parts, module.parts);
  log().SetPin(Sha256Of("unknown"), true);
  EXPECT_EQ(Flushed().size(), 1u);
}

TEST_F(ModuleLogTest, MoreThanABatchIsWrittenInSeveral) {
  Open({.max_batch = 3, .flush_interval = absl::Hours(1)});
  for (int i = 0; i < 20; ++i) {
    log().Put({.key = Sha256Of(absl::StrCat(i))});
  }
  EXPECT_EQ(Flushed().size(), 20u);
}

TEST_F(ModuleLogTest, TheOldestCommitsGoBeyondTheCap) {
  Open({.max_modules = 5});
  for (int i = 0; i < 12; ++i) {
    log().Put({.key = Sha256Of(absl::StrCat(i)),
               .path = absl::StrCat(i),
               .commit_time = absl::FromUnixSeconds(1000 + i)});
    PC_ASSERT_OK(log().Flush());
  }
  const auto modules = Flushed();
  ASSERT_EQ(modules.size(), 5u);
  for (const ModuleRecord& module : modules) {
    EXPECT_GE(module.commit_time, absl::FromUnixSeconds(1007));
  }
}

// However the rows came to be there: none is counted twice, or not at all.
TEST_F(ModuleLogTest, TheCapCountsModulesAndNotTheirChanges) {
  const auto put = [&](int i, absl::Time commit_time) {
    log().Put({.key = Sha256Of(absl::StrCat(i)), .commit_time = commit_time});
    PC_ASSERT_OK(log().Flush());
  };
  Open({.max_modules = 5});
  for (int i = 0; i < 5; ++i) put(i, absl::FromUnixSeconds(1000 + i));
  for (int times = 0; times < 9; ++times) put(4, absl::FromUnixSeconds(2000));
  log().SetPin(Sha256Of("3"), true);
  EXPECT_EQ(Flushed().size(), 5u);
  Open({.max_modules = 5});
  put(1, absl::FromUnixSeconds(3000));
  EXPECT_EQ(Flushed().size(), 5u);
  put(5, absl::FromUnixSeconds(4000));
  const auto modules = Flushed();
  ASSERT_EQ(modules.size(), 5u);
  for (const ModuleRecord& module : modules) {
    EXPECT_NE(module.key, Sha256Of("0"));
  }
}

TEST_F(ModuleLogTest, ABatchThatWasNotWrittenDoesNotCount) {
  Open({.max_modules = 2, .flush_interval = absl::Hours(1)});
  auto db = SqliteDb::Open(dir_.path() + "/r.db");
  PC_ASSERT_OK(db);
  PC_ASSERT_OK(
      db->Exec("CREATE TRIGGER refuse AFTER INSERT ON modules "
               "WHEN (SELECT COUNT(*) FROM modules) > 2 "
               "BEGIN SELECT RAISE(ABORT, 'no'); END"));
  for (const char* name : {"a", "b", "c"}) log().Put({.key = Sha256Of(name)});
  EXPECT_FALSE(log().Flush().ok());
  for (const char* name : {"a", "b"}) log().Put({.key = Sha256Of(name)});
  EXPECT_EQ(Flushed().size(), 2u);
}

TEST_F(ModuleLogTest, AFullQueueDropsNewModulesAndCounts) {
  Open({.max_queued = 4, .flush_interval = absl::Hours(1)});
  for (int i = 0; i < 10; ++i) {
    log().Put({.key = Sha256Of(absl::StrCat(i))});
  }
  // A change of a queued one still has its place.
  log().Put({.key = Sha256Of("0"), .path = "changed"});
  EXPECT_EQ(log().num_dropped(), 6u);
  EXPECT_EQ(Flushed().size(), 4u);
}

TEST_F(ModuleLogTest, AFlushOfNothingReturnsAtOnce) {
  Open({.flush_interval = absl::Hours(1)});
  PC_EXPECT_OK(log().Flush());
}

TEST_F(ModuleLogTest, ABatchThatCannotBeWrittenIsToldByFlush) {
  Open({.flush_interval = absl::Hours(1)});
  auto db = SqliteDb::Open(dir_.path() + "/r.db");
  PC_ASSERT_OK(db);
  PC_ASSERT_OK(db->Exec("DROP TABLE modules"));
  log().Put(FullModule());
  EXPECT_FALSE(log().Flush().ok());
  PC_EXPECT_OK(log().Flush());  // told once
}

}  // namespace
}  // namespace promptcache::daemon

#include "cache_daemon/registry/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RegistryTest : public ::testing::Test {
 protected:
  RegistryTest() { Open(); }

  std::string Path() const { return dir_.path() + "/state/registry.db"; }
  absl::StatusOr<std::unique_ptr<Registry>> TryOpen(const std::string& path) {
    return Registry::Open({.path = path}, &clock_);
  }
  void Open() {
    registry_.reset();
    auto opened = TryOpen(Path());
    PC_ASSERT_OK(opened);
    registry_ = *std::move(opened);
  }
  Registry::PutSchemaResult Put(const std::string& name,
                                const std::string& text) {
    auto put = registry_->PutSchema({.name = name, .text = text});
    EXPECT_THAT(put, IsOk());
    return put.ok() ? *put : Registry::PutSchemaResult{};
  }
  void Sqlite(const std::string& path, const std::string& sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr),
              SQLITE_OK)
        << sqlite3_errmsg(db);
    sqlite3_close(db);
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<Registry> registry_;
};

TEST_F(RegistryTest, TheFirstTextIsRevisionOne) {
  const auto put = Put("travel", "<schema/>");
  EXPECT_TRUE(put.created);
  EXPECT_TRUE(put.changed);
  EXPECT_EQ(put.schema.revision, 1u);
  EXPECT_EQ(put.schema.text, "<schema/>");
  EXPECT_EQ(put.schema.text_sha256, Sha256Of("<schema/>"));
  EXPECT_EQ(put.schema.create_time, clock_.Now());
}

TEST_F(RegistryTest, TheSameTextAgainChangesNothing) {
  Put("travel", "a");
  clock_.Advance(absl::Hours(1));
  const auto again = Put("travel", "a");
  EXPECT_FALSE(again.created);
  EXPECT_FALSE(again.changed);
  EXPECT_EQ(again.schema.revision, 1u);
  EXPECT_EQ(again.schema.create_time, clock_.Now() - absl::Hours(1));
}

TEST_F(RegistryTest, AnotherTextIsARevisionAndOldOnesStay) {
  Put("travel", "a");
  Put("travel", "b");
  // An older text again is not the current one's repetition.
  EXPECT_EQ(Put("travel", "a").schema.revision, 3u);
  EXPECT_EQ(registry_->GetSchema("travel", 2)->text, "b");
  EXPECT_EQ(registry_->GetSchema("travel", 0)->revision, 3u);
}

TEST_F(RegistryTest, UnknownNamesAndRevisionsAreNotFound) {
  Put("travel", "a");
  EXPECT_THAT(registry_->GetSchema("other", 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("other")));
  EXPECT_THAT(registry_->GetSchema("travel", 2),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("revision 2")));
  EXPECT_THAT(registry_->GetSchema("travel", UINT64_MAX),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("revision")));
  EXPECT_THAT(registry_->DeleteSchema("other"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("other")));
}

TEST_F(RegistryTest, BytesOfAnyKindComeBack) {
  const std::string text("\0\xff' \"; DROP TABLE schemas; --", 29);
  Put("x'); --", text);
  EXPECT_EQ(registry_->GetSchema("x'); --", 0)->text, text);
  Put("empty", "");
  EXPECT_EQ(registry_->GetSchema("empty", 0)->text, "");
}

TEST_F(RegistryTest, PoliciesAreKeptUntilOthersAreGiven) {
  const PolicyRecord hour{.ttl = absl::Hours(1), .absolute_ttl = true};
  const PolicyRecord pin{.pin = true};
  PC_ASSERT_OK(registry_->PutSchema({.name = "s",
                                     .text = "a",
                                     .policy = hour,
                                     .module_policies = {{"m/n", pin}}}));
  const auto kept = Put("s", "b");
  EXPECT_EQ(kept.schema.policy, hour);
  EXPECT_EQ(kept.schema.module_policies.at("m/n"), pin);

  const auto put = registry_->PutSchema({.name = "s",
                                         .text = "b",
                                         .policy = PolicyRecord{},
                                         .module_policies = {{"k", hour}}});
  PC_ASSERT_OK(put);
  EXPECT_FALSE(put->created);
  EXPECT_TRUE(put->changed);
  EXPECT_EQ(put->schema.policy, PolicyRecord{});
  EXPECT_EQ(put->schema.module_policies.size(), 1u);
  EXPECT_EQ(put->schema.module_policies.at("k"), hour);
}

TEST_F(RegistryTest, ADeletedSchemaIsGoneAndItsRevisionsAreNotUsedAgain) {
  Put("s", "a");
  Put("s", "b");
  PC_ASSERT_OK(registry_->PutSchema(
      {.name = "s", .text = "b", .policy = PolicyRecord{.pin = true}}));
  PC_ASSERT_OK(registry_->DeleteSchema("s"));
  for (uint64_t revision : {0, 1, 2}) {
    EXPECT_THAT(registry_->GetSchema("s", revision),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr("s")));
  }
  EXPECT_THAT(registry_->ListSchemas(10, "")->schemas, IsEmpty());
  EXPECT_THAT(registry_->CountSchemas(), IsOkAndHolds(0u));

  const auto back = Put("s", "b");
  EXPECT_TRUE(back.created);
  EXPECT_EQ(back.schema.revision, 3u);
  EXPECT_FALSE(back.schema.policy.pin);
}

TEST_F(RegistryTest, PagesNameEverySchemaOnce) {
  for (int i = 0; i < 7; ++i) Put(absl::StrCat("s", i), "text");
  std::vector<std::string> names;
  std::string token;
  int num_pages = 0;
  do {
    const auto page = registry_->ListSchemas(3, token);
    PC_ASSERT_OK(page);
    for (const SchemaRecord& schema : page->schemas) {
      EXPECT_THAT(schema.text, IsEmpty());
      names.push_back(schema.name);
    }
    token = page->next_page_token;
    ++num_pages;
    // What goes behind the reader's back shifts nothing.
    if (num_pages == 1) {
      PC_ASSERT_OK(registry_->DeleteSchema("s0"));
    }
  } while (!token.empty());
  EXPECT_THAT(names, ElementsAre("s0", "s1", "s2", "s3", "s4", "s5", "s6"));
  EXPECT_EQ(num_pages, 3);
}

TEST_F(RegistryTest, LimitsAreToldWithTheirNumbers) {
  const auto long_name =
      registry_->PutSchema({.name = std::string(129, 'n'), .text = "a"});
  EXPECT_THAT(long_name, StatusIs(absl::StatusCode::kInvalidArgument,
                                  HasSubstr("129 bytes, 1 to 128")));
  EXPECT_THAT(registry_->PutSchema({.name = "", .text = "a"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("name")));
  const auto long_text = registry_->PutSchema(
      {.name = "s", .text = std::string((4 << 20) + 1, 't')});
  EXPECT_THAT(long_text, StatusIs(absl::StatusCode::kInvalidArgument,
                                  HasSubstr("the limit is 4194304")));
}

TEST_F(RegistryTest, EverythingIsThereAfterARestart) {
  Put("s", "a");
  PC_ASSERT_OK(registry_->PutSchema(
      {.name = "s",
       .text = "b",
       .policy = PolicyRecord{.ttl = absl::Minutes(5)},
       .module_policies = {{"m", PolicyRecord{.pin = true}}}}));
  Open();
  const auto schema = registry_->GetSchema("s", 0);
  PC_ASSERT_OK(schema);
  EXPECT_EQ(schema->revision, 2u);
  EXPECT_EQ(schema->policy.ttl, absl::Minutes(5));
  EXPECT_TRUE(schema->module_policies.at("m").pin);
  EXPECT_EQ(registry_->GetSchema("s", 1)->text, "a");
}

TEST_F(RegistryTest, ACrashLosesNothingThatWasAcknowledged) {
  Put("s", "a");
  registry_->modules().Put({.key = Sha256Of("m"), .schema = "s", .path = "m"});
  PC_ASSERT_OK(registry_->modules().Flush());
  // What a killed process leaves: the file, and a log not yet merged into it.
  const std::string copy = dir_.path() + "/copy";
  std::filesystem::copy(dir_.path() + "/state", copy);
  ASSERT_GT(std::filesystem::file_size(copy + "/registry.db-wal"), 0u);
  std::filesystem::remove(copy + "/registry.db-shm");
  // The process would have died within a write: a torn frame at the end.
  std::ofstream(copy + "/registry.db-wal", std::ios::app) << "torn frame";

  const auto reopened = TryOpen(copy + "/registry.db");
  PC_ASSERT_OK(reopened);
  EXPECT_EQ((*reopened)->GetSchema("s", 0)->text, "a");
  const auto modules = (*reopened)->LoadModules();
  PC_ASSERT_OK(modules);
  ASSERT_EQ(modules->size(), 1u);
  EXPECT_EQ(modules->at(0).path, "m");
}

// Run by the next test, in a process of its own.
constexpr char kLookAt[] = "REGISTRY_TEST_LOOK_AT";

TEST(OtherProcessTest, DISABLED_Looks) {
  const char* path = std::getenv(kLookAt);
  ASSERT_NE(path, nullptr);
  auto db = SqliteDb::Open(path);
  PC_ASSERT_OK(db);
  EXPECT_THAT(db->QueryInt("SELECT COUNT(*) FROM schemas"), IsOkAndHolds(1));
}

// As an operator does with the sqlite3 shell, while the daemon runs.
TEST_F(RegistryTest, AnotherProcessThatLooksTakesNothingAway) {
  Put("before", "<schema/>");
  ASSERT_EQ(::setenv(kLookAt, Path().c_str(), 1), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    ::execl("/proc/self/exe", "registry_test",
            "--gtest_filter=*.DISABLED_Looks",
            "--gtest_also_run_disabled_tests", nullptr);
    ::_exit(127);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;

  Put("after", "<schema/>");
  // What a daemon that is killed now leaves behind.
  const std::string copy = dir_.path() + "/copy.db";
  for (const char* suffix : {"", "-wal"}) {
    std::error_code error;
    std::filesystem::copy_file(Path() + suffix, copy + suffix, error);
    EXPECT_FALSE(error) << suffix << ": " << error.message();
  }
  auto left = TryOpen(copy);
  PC_ASSERT_OK(left);
  EXPECT_THAT((*left)->CountSchemas(), IsOkAndHolds(2));
}

TEST_F(RegistryTest, ADamagedFileIsToldClearly) {
  for (int i = 0; i < 50; ++i) {
    Put(absl::StrCat("s", i), std::string(8000, 'x'));
  }
  registry_.reset();
  {
    std::fstream file(Path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096);
    file << std::string(40000, '\x5a');
  }
  EXPECT_THAT(TryOpen(Path()),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("damaged")));
  std::ofstream(dir_.path() + "/text.db") << std::string(5000, 't');
  EXPECT_THAT(TryOpen(dir_.path() + "/text.db"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("text.db")));
}

TEST_F(RegistryTest, AFileIsOneRegistrysAlone) {
  EXPECT_THAT(TryOpen(Path()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       absl::StrCat("another daemon (process ", ::getpid(),
                                    ") keeps its registry in ", Path(),
                                    ": stop it, or choose another --db")));
  registry_.reset();
  PC_EXPECT_OK(TryOpen(Path()));
}

TEST_F(RegistryTest, AFileOfANewerVersionIsRefused) {
  registry_.reset();
  Sqlite(Path(), "PRAGMA user_version=7");
  EXPECT_THAT(TryOpen(Path()), StatusIs(absl::StatusCode::kFailedPrecondition,
                                        HasSubstr("version 7")));
}

TEST_F(RegistryTest, AFileOfAnotherProgramIsRefused) {
  const std::string path = dir_.path() + "/other.db";
  Sqlite(path, "CREATE TABLE songs(name TEXT)");
  EXPECT_THAT(TryOpen(path), StatusIs(absl::StatusCode::kFailedPrecondition,
                                      HasSubstr("another program")));
}

TEST_F(RegistryTest, OthersCannotReadTheFile) {
  struct stat info{};
  ASSERT_EQ(::stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0077u, 0u);
}

TEST_F(RegistryTest, APathThatCannotBeIsAnError) {
  EXPECT_FALSE(TryOpen(Path() + "/below/a/file.db").ok());
  EXPECT_THAT(TryOpen(""),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("path")));
}

TEST_F(RegistryTest, ManyThreadsMakeOneRevisionEach) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 10; ++i) {
        PC_EXPECT_OK(registry_->PutSchema(
            {.name = "s", .text = absl::StrCat(t, ":", i)}));
        PC_EXPECT_OK(registry_->GetSchema("s", 0));
        registry_->modules().Put({.key = Sha256Of(absl::StrCat(t, i))});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(registry_->GetSchema("s", 0)->revision, 40u);
  PC_EXPECT_OK(registry_->modules().Flush());
  EXPECT_EQ(registry_->LoadModules()->size(), 40u);
}

}  // namespace
}  // namespace promptcache::daemon

#include "cache_daemon/core/known_modules.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::daemon {
namespace {

ModuleInfo Gone(int n, MissReason why = MissReason::kEvicted) {
  ModuleInfo info;
  info.key = Sha256Of(absl::StrCat(n));
  info.absence = why;
  return info;
}
ModuleKey KeyOfGone(int n) { return Gone(n).key; }

TEST(KnownModulesTest, TheLatestReasonCounts) {
  KnownModules known(10);
  known.Add(Gone(1, MissReason::kEvicted));
  known.Add(Gone(1, MissReason::kExpired));
  EXPECT_EQ(known.Find(KeyOfGone(1))->absence, MissReason::kExpired);
  EXPECT_EQ(known.num_modules(), 1u);
  known.Remove(KeyOfGone(1));
  EXPECT_EQ(known.Find(KeyOfGone(1)), nullptr);
}

TEST(KnownModulesTest, TheOldestIsForgotten) {
  KnownModules known(3);
  for (int n : {1, 2, 3}) known.Add(Gone(n));
  known.Add(Gone(1));  // young again
  known.Add(Gone(4));
  EXPECT_EQ(known.Find(KeyOfGone(2)), nullptr);
  for (int n : {1, 3, 4}) EXPECT_NE(known.Find(KeyOfGone(n)), nullptr);
}

TEST(KnownModulesTest, StaysBoundedUnderChurn) {
  KnownModules known(8);
  for (int n = 0; n < 10'000; ++n) {
    known.Add(Gone(n % 20));
    if (n % 3 == 0) known.Remove(KeyOfGone(n % 7));
    known.SetIdentity("d", "s", absl::StrCat(n % 50), {1});
    PC_ASSERT_OK(known.CheckInvariants());
  }
  EXPECT_EQ(known.num_names(), 8u);
}

TEST(KnownModulesTest, WithoutCapacityNothingIsKnown) {
  KnownModules known(0);
  known.Add(Gone(1));
  known.SetIdentity("d", "s", "p", {1});
  EXPECT_EQ(known.Find(KeyOfGone(1)), nullptr);
  EXPECT_EQ(known.Differing("d", "s", "p", {2}), IdentityField::kNone);
}

TEST(KnownModulesTest, KeysAreWalkedInOrder) {
  KnownModules known(100);
  for (int n = 0; n < 50; ++n) known.Add(Gone(n));
  int seen = 0;
  ModuleKey last;
  for (const ModuleInfo* info = known.FirstFrom(ModuleKey{}); info != nullptr;
       info = known.FirstAfter(info->key)) {
    EXPECT_LT(last, info->key);
    last = info->key;
    ++seen;
  }
  EXPECT_EQ(seen, 50);
}

TEST(KnownModulesTest, TheFirstDifferingFieldIsNamed) {
  KnownModules known(10);
  known.SetIdentity("d", "s", "p", {1, 2, 3, 4, 5, 6, 7});
  const auto differing = [&](const IdentityParts& parts) {
    return known.Differing("d", "s", "p", parts);
  };
  EXPECT_EQ(differing({1, 2, 3, 4, 5, 6, 7}), IdentityField::kNone);
  EXPECT_EQ(differing({9, 2, 3, 4, 5, 6, 9}), IdentityField::kModel);
  EXPECT_EQ(differing({1, 2, 3, 4, 5, 9, 9}), IdentityField::kPieces);
  EXPECT_EQ(differing({1, 2, 3, 4, 5, 6, 9}), IdentityField::kStart);
  EXPECT_EQ(differing({}), IdentityField::kNone);
  EXPECT_EQ(known.Differing("d", "s", "q", {9}), IdentityField::kNone);
}

}  // namespace
}  // namespace promptcache::daemon

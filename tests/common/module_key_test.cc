#include "common/module_key.h"

#include <gtest/gtest.h>

namespace promptcache {
namespace {

pml::Plan TwoModulePlan() {
  pml::Plan plan;
  pml::PlanModule preamble;
  preamble.pieces = {{.offset = 0, .tokens = {1, 2, 3}}};
  preamble.length = 3;
  pml::PlanModule doc;
  doc.path = "doc";
  doc.context = {
      {.module = 0, .first_token = 0, .num_tokens = 3, .offset = -3}};
  doc.pieces = {{.offset = 0, .tokens = {4, 5}}, {.offset = 9, .tokens = {6}}};
  doc.placeholders = {{.offset = 2, .tokens = {7}}};
  doc.length = 10;
  plan.modules = {preamble, doc};
  return plan;
}

IdentityBase Base() {
  return {.model_fingerprint = Sha256Of("model"),
          .tokenizer_digest = Sha256Of("tokenizer"),
          .layout = {.num_layers = 2, .num_kv_heads = 1, .head_dim = 16}};
}

TEST(ModuleKeyTest, SamePlanSameKeys) {
  const auto a = ModuleIdentities(TwoModulePlan(), Base());
  const auto b = ModuleIdentities(TwoModulePlan(), Base());
  ASSERT_EQ(a.size(), 2u);
  EXPECT_EQ(a[1].key, b[1].key);
  EXPECT_NE(a[0].key, a[1].key);
  EXPECT_TRUE(a[0].context_key.IsZero());
  EXPECT_FALSE(a[1].context_key.IsZero());
}

TEST(ModuleKeyTest, NameSchemaPlaceAndPageSizeAreNotIdentity) {
  pml::Plan moved = TwoModulePlan();
  moved.schema = "another";
  moved.modules[1].path = "renamed";
  moved.modules[1].schema_start = 77;
  IdentityBase base = Base();
  base.layout.page_tokens = 32;
  EXPECT_EQ(ModuleIdentities(TwoModulePlan(), Base())[1].key,
            ModuleIdentities(moved, base)[1].key);
}

TEST(ModuleKeyTest, StartIsIdentityForAbsolutePositions) {
  pml::Plan moved = TwoModulePlan();
  moved.modules[1].schema_start = 77;
  IdentityBase base = Base();
  base.absolute_positions = true;
  EXPECT_NE(ModuleIdentities(TwoModulePlan(), base)[1].key,
            ModuleIdentities(moved, base)[1].key);
}

// Lists that share their items, in any order, are hashed as if each had its
// own.
TEST(ModuleKeyTest, WhatContextsShareChangesNoKey) {
  std::vector<pml::ContextItem> items;
  for (int32_t i = 0; i < 5; ++i) {
    items.push_back({.module = i % 2, .num_tokens = 3, .offset = i});
  }
  items[3] = {.offset = 8, .tokens = {1, 2}};
  const pml::ContextList all(items);
  pml::Plan shared, apart;
  for (const size_t seen : {0, 0, 1, 2, 5, 3, 5, 1, 0, 4}) {
    pml::PlanModule module;
    module.pieces = {{.offset = 0, .tokens = {4, 5, 6}}};
    module.context = all.First(seen);
    shared.modules.push_back(module);
    module.context = all.First(seen).Copy();
    apart.modules.push_back(module);
  }
  const auto a = ModuleIdentities(shared, Base());
  const auto b = ModuleIdentities(apart, Base());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].key, b[i].key) << i;
    EXPECT_EQ(a[i].context_key, b[i].context_key) << i;
  }
  EXPECT_EQ(a[4].key, a[6].key);
  EXPECT_NE(a[4].key, a[5].key);
}

// Every way in which two modules can differ gives another key, and the parts
// say where.
TEST(ModuleKeyTest, EachFieldChangesTheKeyAndItsOwnPart) {
  const ModuleIdentity reference = ModuleIdentities(TwoModulePlan(), Base())[1];
  const auto expect_differs = [&](const pml::Plan& plan,
                                  const IdentityBase& base,
                                  IdentityField field) {
    const ModuleIdentity other = ModuleIdentities(plan, base)[1];
    EXPECT_NE(other.key, reference.key) << IdentityFieldName(field);
    const size_t part = static_cast<size_t>(field) - 1;
    EXPECT_NE(other.parts[part], reference.parts[part])
        << IdentityFieldName(field);
  };
  IdentityBase base = Base();
  base.model_fingerprint = Sha256Of("another");
  expect_differs(TwoModulePlan(), base, IdentityField::kModel);
  base = Base();
  base.tokenizer_digest = Sha256Of("another");
  expect_differs(TwoModulePlan(), base, IdentityField::kTokenizer);
  base = Base();
  base.layout.type = KvType::kFp16;
  expect_differs(TwoModulePlan(), base, IdentityField::kLayout);
  base = Base();
  base.isolation_domain = "tenant";
  expect_differs(TwoModulePlan(), base, IdentityField::kIsolationDomain);

  pml::Plan plan = TwoModulePlan();
  plan.modules[1].context = {{.module = 0, .num_tokens = 3, .offset = -4}};
  expect_differs(plan, Base(), IdentityField::kContext);
  plan = TwoModulePlan();
  plan.modules[0].pieces[0].tokens[1] = 9;
  expect_differs(plan, Base(), IdentityField::kContext);
  plan = TwoModulePlan();
  plan.modules[1].context = {{.module = 0, .num_tokens = 2, .offset = -3}};
  expect_differs(plan, Base(), IdentityField::kContext);
  plan = TwoModulePlan();
  plan.modules[1].pieces[1].offset = 8;
  expect_differs(plan, Base(), IdentityField::kPieces);
  plan = TwoModulePlan();
  plan.modules[1].placeholders[0].tokens = {8};
  expect_differs(plan, Base(), IdentityField::kPieces);
  plan = TwoModulePlan();
  plan.modules[1].pieces = {{.offset = 0, .tokens = {4, 5, 6}}};
  expect_differs(plan, Base(), IdentityField::kPieces);
}

}  // namespace
}  // namespace promptcache

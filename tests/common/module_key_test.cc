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
  plan.modules[1].context[0].offset = -4;
  expect_differs(plan, Base(), IdentityField::kContext);
  plan = TwoModulePlan();
  plan.modules[0].pieces[0].tokens[1] = 9;
  expect_differs(plan, Base(), IdentityField::kContext);
  plan = TwoModulePlan();
  plan.modules[1].context[0].num_tokens = 2;
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

// common/pml/LANGUAGE.md, the users' page: what it shows is what happens. And
// the example of the first page, README.md.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/pml/compiler.h"
#include "common/pml/error.h"
#include "common/pml/plan_json.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::pml {
namespace {

const std::filesystem::path kRoot = PROMPTCACHE_SOURCE_DIR;
const std::filesystem::path kFolder = kRoot / "common" / "pml";

std::string Page() { return ReadFileOrDie(kFolder / "LANGUAGE.md"); }

struct Fence {
  std::string kind;  // "xml", "text"
  std::string body;
};

std::vector<Fence> Fences(std::string_view page) {
  std::vector<Fence> out;
  for (size_t at = 0; (at = page.find("\n```", at)) != std::string::npos;) {
    const size_t body = page.find('\n', at + 1) + 1;
    const size_t end = page.find("```\n", body);
    out.push_back({.kind = std::string(page.substr(at + 4, body - at - 5)),
                   .body = std::string(page.substr(body, end - body))});
    at = end + 3;
  }
  return out;
}

// What `promptcache pml check --schema s.xml p.xml` prints.
std::string Check(const std::string& schema_text,
                  const std::string& prompt_text, const Tokenizer& tokenizer) {
  const auto plan = [&]() -> absl::StatusOr<Plan> {
    const auto schema = CompileSchema(schema_text, tokenizer,
                                      *ChatTemplate::FromName("chatml"));
    if (!schema.ok()) return schema.status();
    const auto prompt = ParsePrompt(prompt_text);
    if (!prompt.ok()) return prompt.status();
    return Compile(**schema, **prompt);
  }();
  if (plan.ok()) return PlanToTable(*plan, tokenizer);
  const auto error = PmlErrorOf(plan.status());
  if (!error.has_value()) return plan.status().ToString();
  return absl::StrCat(error->source == Source::kSchema ? "s" : "p",
                      ".xml:", error->place.line, ":", error->place.column,
                      ": ", error->reason, ": ", error->detail, "\n");
}

class PmlLanguageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string path = SmolLm2Path();
    if (path.empty()) GTEST_SKIP() << "no model file: run tools/fetch_model";
    const auto model = worker::OpenModelFile(path, {});
    PC_ASSERT_OK(model);
    auto tokenizer = worker::CreateTokenizer((*model)->vocabulary());
    PC_ASSERT_OK(tokenizer);
    tokenizer_ = *std::move(tokenizer);
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  std::unique_ptr<const Tokenizer> tokenizer_;
};

TEST_F(PmlLanguageTest, ThePagesExamplesPrintWhatItSays) {
  std::string schema, prompt;
  int num_shown = 0;
  for (const Fence& fence : Fences(Page())) {
    if (fence.body.starts_with("<schema")) {
      schema = fence.body;
    } else if (fence.kind == "xml") {
      prompt = fence.body;
    } else {
      EXPECT_EQ(Check(schema, prompt, tokenizer()), fence.body) << prompt;
      ++num_shown;
    }
  }
  EXPECT_GE(num_shown, 5);
}

TEST_F(PmlLanguageTest, TheFirstPagesExampleCompiles) {
  std::vector<std::string> documents;
  for (const Fence& fence : Fences(ReadFileOrDie(kRoot / "README.md"))) {
    if (fence.kind == "xml") documents.push_back(fence.body);
  }
  ASSERT_EQ(documents.size(), 2u);
  EXPECT_THAT(Check(documents[0], documents[1], tokenizer()),
              ::testing::HasSubstr("; MODULAR\n"));
}

// The words "PML_..." in `text`, `before` and `after` them.
std::set<std::string> Codes(std::string_view text, std::string_view before,
                            std::string_view after) {
  constexpr std::string_view kChars = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_";
  std::set<std::string> out;
  const std::string start = absl::StrCat(std::string(before), "PML_");
  for (size_t at = 0; (at = text.find(start, at)) != std::string::npos; ++at) {
    const size_t word = at + before.size();
    const size_t end = text.find_first_not_of(kChars, word);
    if (end != std::string::npos && text.substr(end).starts_with(after)) {
      out.emplace(text.substr(word, end - word));
    }
  }
  return out;
}

TEST(PmlCodesTest, ThePageNamesEveryCode) {
  std::set<std::string> made;
  for (const auto& file : std::filesystem::directory_iterator(kFolder)) {
    if (file.path().extension() != ".cc") continue;
    made.merge(Codes(ReadFileOrDie(file.path()), "\"", "\""));
  }
  EXPECT_GE(made.size(), 25u);
  EXPECT_EQ(Codes(Page(), "\n| `", "` | "), made);
}

}  // namespace
}  // namespace promptcache::pml

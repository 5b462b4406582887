#include <chrono>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/plan_text.h"
#include "tools/cli/policy_flags.h"
#include "tools/cli/prompt_flags.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateFlags {
  PromptFlags prompt;
  uint32_t max_tokens = 256;
  float temperature = 0, top_p = 1, min_p = 0, repetition_penalty = 1;
  uint32_t top_k = 0, link_tokens = 0, top_logprobs = 0;
  uint64_t seed = 0;
  std::vector<std::string> stop;
  std::string cache_mode = "read-write";
  std::string attention = "plan";
  std::string match = "prefix";
  bool retain = false, no_retain = false;
  std::string retain_ttl;
  bool show_plan = false, ignore_eos = false, pending_compute = false;
};

void AddMatch(CLI::App* command, std::string* match) {
  command
      ->add_option("--match", *match,
                   "of a prompt without schema: prefix: its beginning, when "
                   "some request retained it; auto: also registered modules "
                   "whose text stands in it; none")
      ->check(CLI::IsMember({"none", "prefix", "auto"}))
      ->capture_default_str()
      ->group("Cache");
}

v1::Match MatchOf(const std::string& match) {
  return match == "none"   ? v1::MATCH_NONE
         : match == "auto" ? v1::MATCH_AUTO
                           : v1::MATCH_PREFIX;
}

absl::StatusOr<v1::GenerateRequest> Request(const GenerateFlags& flags) {
  v1::GenerateRequest request;
  auto prompt = flags.prompt.Prompt();
  if (!prompt.ok()) return prompt.status();
  *request.mutable_prompt() = *prompt;
  request.set_layout(flags.prompt.layout());
  request.set_max_tokens(flags.max_tokens);
  v1::Sampling* sampling = request.mutable_sampling();
  sampling->set_temperature(flags.temperature);
  sampling->set_top_k(flags.top_k);
  sampling->set_top_p(flags.top_p);
  sampling->set_min_p(flags.min_p);
  sampling->set_repetition_penalty(flags.repetition_penalty);
  sampling->set_seed(flags.seed);
  for (const std::string& stop : flags.stop) request.add_stop(stop);
  request.set_cache_mode(flags.cache_mode == "bypass" ? v1::CACHE_MODE_BYPASS
                         : flags.cache_mode == "read-only"
                             ? v1::CACHE_MODE_READ_ONLY
                             : v1::CACHE_MODE_READ_WRITE);
  request.set_attention(flags.attention == "full" ? v1::ATTENTION_MODE_FULL
                                                  : v1::ATTENTION_MODE_PLAN);
  request.set_top_logprobs(flags.top_logprobs);
  request.set_ignore_eos(flags.ignore_eos);
  request.set_pending_compute(flags.pending_compute);
  request.set_include_plan(flags.show_plan);
  request.set_link_tokens(flags.link_tokens);
  request.set_match(MatchOf(flags.match));
  request.set_no_retain(flags.no_retain);
  if (flags.retain || !flags.retain_ttl.empty()) {
    if (request.prompt().has_pml()) {
      return UsageError(
          "--retain is for --text and --message; a schema keeps its modules "
          "itself");
    }
    request.mutable_retain();
  }
  if (!flags.retain_ttl.empty()) {
    auto ttl = SetTtl(flags.retain_ttl, request.mutable_retain());
    if (!ttl.ok()) return ttl;
  }
  return request;
}

void PrintUsage(const v1::Started& started, const v1::Completed& done) {
  const v1::Usage& usage = done.usage();
  const v1::Timings& t = done.timings();
  const double decode_s = t.decode_ms() / 1000;
  std::cerr << absl::StreamFormat(
      "\nprompt %d tokens: %d read from the cache, %d created, %d fresh (%s)\n",
      usage.prompt_tokens(), usage.cached_tokens(), usage.created_tokens(),
      usage.fresh_tokens(),
      EnumWord(v1::Exactness_descriptor(), done.exactness()));
  if (!started.matched_schema().empty()) {
    std::cerr << "  modules of schema " << started.matched_schema()
              << " were found in the prompt\n";
  }
  if (usage.retained_tokens() > 0) {
    std::cerr << absl::StreamFormat(
        "  %d tokens of prompt and answer stay in the cache\n",
        usage.retained_tokens());
  }
  for (const auto& miss : started.misses()) {
    std::cerr << absl::StreamFormat(
        "  miss: %s, %d tokens (%s)\n",
        miss.path().empty() ? "(preamble)" : miss.path(), miss.num_tokens(),
        MissText(miss.reason(), miss.differing_field()));
  }
  std::cerr << absl::StreamFormat(
      "first token after %s (queue %.1f, compile %.1f, acquire %.1f, prefill "
      "%.1f ms)\n",
      HumanMs(t.ttft_ms()), t.queue_ms(), t.compile_ms(), t.acquire_ms(),
      t.prefill_ms());
  std::cerr << absl::StreamFormat(
      "answer %d tokens in %s%s, %s\n", usage.completion_tokens(),
      HumanMs(t.decode_ms()),
      decode_s > 0 && usage.completion_tokens() > 1
          ? absl::StrFormat(" (%.1f a second)",
                            (usage.completion_tokens() - 1) / decode_s)
          : "",
      EnumWord(v1::FinishReason_descriptor(), done.finish_reason()));
  for (const auto& notice : done.notices()) {
    std::cerr << "note: " << notice << "\n";
  }
}

// Streams one answer; what it showed, in the end, as JSON too.
class Printer {
 public:
  Printer(bool json, bool show_plan, bool logprobs)
      : json_(json), show_plan_(show_plan), logprobs_(logprobs) {}

  void On(const v1::GenerateResponse& event) {
    if (event.has_started()) OnStarted(event.started());
    if (event.has_delta()) OnDelta(event.delta());
    if (event.has_completed()) OnCompleted(event.completed());
  }
  bool completed() const { return completed_; }
  // What there is of an answer that was broken off.
  void OnInterrupted() {
    if (!json_) {
      std::cout << "\n";
      return;
    }
    PrintJson({{"error", {{"code", "CANCELLED"}, {"message", "interrupted"}}}});
  }

 private:
  void OnStarted(const v1::Started& started) {
    started_ = started;
    if (json_) {
      const Json json = ToJson(started);
      out_["request_id"] = started.request_id();
      out_["misses"] = json["misses"];
      if (show_plan_) out_["spans"] = json["spans"];
    } else if (show_plan_) {
      std::cerr << PlanText(started.spans()) << "\n";
    }
  }
  void OnDelta(const v1::Delta& delta) {
    if (!json_) {
      std::cout << delta.text() << std::flush;
      return;
    }
    text_ += delta.text();
    for (const auto& token : delta.tokens()) {
      if (logprobs_) {
        tokens_.push_back(ToJson(token));
      } else {
        tokens_.push_back(token.id());
      }
    }
  }
  void OnCompleted(const v1::Completed& done) {
    completed_ = true;
    if (!json_) {
      std::cout << "\n";
      PrintUsage(started_, done);
      return;
    }
    PrintJson(ToJson(done));
  }
  void PrintJson(const Json& end) {
    out_["text"] = text_;
    out_["tokens"] = tokens_;
    out_.update(end);
    std::cout << out_.dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  }

  const bool json_, show_plan_, logprobs_;
  bool completed_ = false;
  v1::Started started_;
  std::string text_;
  Json tokens_ = Json::array();
  Json out_ = Json::object();
};

int Generate(const Globals& globals, const GenerateFlags& flags) {
  auto request = Request(flags);
  if (!request.ok()) return Report(request.status(), globals.json);
  Interrupt interrupt;
  auto connected = globals.ConnectWorker();
  if (!connected.ok()) return Report(connected.status(), globals.json);
  // Shared with the thread that hears signals.
  const std::shared_ptr<WorkerClient> worker = *std::move(connected);
  interrupt.SetCallback([worker] { worker->CancelAll(); });
  Printer printer(globals.json, flags.show_plan, flags.top_logprobs > 0);
  const absl::Status status =
      worker->Generate(*request, [&](const v1::GenerateResponse& event) {
        printer.On(event);
        return true;
      });
  if (interrupt.happened() && !printer.completed()) {
    printer.OnInterrupted();
    return kExitInterrupted;
  }
  if (!status.ok()) {
    return Report(NamingFile(status, "prompt", flags.prompt.file()),
                  globals.json);
  }
  return printer.completed() ? kExitOk : kExitRefused;
}

struct CountFlags {
  PromptFlags prompt;
  std::string match = "prefix";
};

int Count(const Globals& globals, const CountFlags& flags) {
  auto prompt = flags.prompt.Prompt();
  if (!prompt.ok()) return Report(prompt.status(), globals.json);
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  v1::CountTokensRequest request;
  *request.mutable_prompt() = *prompt;
  request.set_layout(flags.prompt.layout());
  request.set_match(MatchOf(flags.match));
  auto response = (*worker)->CountTokens(request);
  if (!response.ok()) {
    return Report(NamingFile(response.status(), "prompt", flags.prompt.file()),
                  globals.json);
  }
  if (globals.json) {
    std::cout << ToJson(*response).dump(2) << "\n";
    return kExitOk;
  }
  std::cout << PlanText(response->spans())
            << absl::StrFormat(
                   "%d tokens, %d of them in modules; %s\n",
                   response->prompt_tokens(), response->cacheable_tokens(),
                   EnumWord(v1::Exactness_descriptor(), response->exactness()));
  return kExitOk;
}

void AddSampling(CLI::App* command, GenerateFlags* flags) {
  command->add_option("--max-tokens", flags->max_tokens, "longest answer")
      ->check(CLI::Range(uint32_t{1}, std::numeric_limits<uint32_t>::max()))
      ->capture_default_str()
      ->group("Sampling");
  command
      ->add_option("--temperature", flags->temperature,
                   "0: the likeliest token, always")
      ->capture_default_str()
      ->group("Sampling");
  command->add_option("--top-k", flags->top_k, "0: off")->group("Sampling");
  command->add_option("--top-p", flags->top_p, "1: off")->group("Sampling");
  command->add_option("--min-p", flags->min_p, "0: off")->group("Sampling");
  command
      ->add_option("--repetition-penalty", flags->repetition_penalty, "1: off")
      ->group("Sampling");
  command->add_option("--seed", flags->seed, "the same seed, the same answer")
      ->group("Sampling");
  command
      ->add_option("--stop", flags->stop,
                   "end the answer before this text; repeatable")
      ->allow_extra_args(false)
      ->group("Sampling");
  command
      ->add_flag("--ignore-eos", flags->ignore_eos,
                 "go on to --max-tokens (for measuring)")
      ->group("Sampling");
  command
      ->add_option("--top-logprobs", flags->top_logprobs,
                   "with --json: log-probabilities of the best N (up to 20)")
      ->group("Sampling");
}

}  // namespace

void AddGenerate(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app->add_subcommand(
      "generate",
      "answer a prompt: tokens on standard output as they come, then what it "
      "took on standard error");
  command->footer(
      "\nExamples:\n"
      "  promptcache generate prompt.xml\n"
      "  echo 'Why is the sky blue?' | promptcache generate\n"
      "  promptcache generate --message system:'Be brief.' "
      "--message user:Hello");
  flags->prompt.AddTo(command);
  AddSampling(command, flags.get());
  command
      ->add_option("--cache-mode", flags->cache_mode,
                   "read-write; read-only: encode nothing into the cache; "
                   "bypass: the same plan without the cache")
      ->check(CLI::IsMember({"read-write", "read-only", "bypass"}))
      ->capture_default_str()
      ->group("Cache");
  command
      ->add_option("--attention", flags->attention,
                   "plan; full: every token sees all before it, nothing is "
                   "cached: what there would be without modules")
      ->check(CLI::IsMember({"plan", "full"}))
      ->capture_default_str()
      ->group("Cache");
  AddMatch(command, &flags->match);
  auto* retain = command->add_flag(
      "--retain", flags->retain,
      "leave a prompt without schema, and its answer, in the cache for "
      "prompts that go on from there: whole chunks of 64 tokens, nothing "
      "below");
  auto* retain_ttl = command->add_option(
      "--retain-ttl", flags->retain_ttl,
      "--retain, and for how long after the last use: 90s, 10m");
  auto* no_retain = command->add_flag(
      "--no-retain", flags->no_retain,
      "leave nothing of it there, also where the worker does so unasked "
      "(promptcache-worker --retain_ttl)");
  no_retain->excludes(retain)->excludes(retain_ttl);
  for (CLI::Option* option : {retain, retain_ttl, no_retain}) {
    option->group("Cache");
  }
  command
      ->add_option("--link-tokens", flags->link_tokens,
                   "recompute the first N tokens of each module")
      ->group("Cache");
  command
      ->add_flag("--pending-compute", flags->pending_compute,
                 "compute what another worker is encoding; do not wait for it")
      ->group("Cache");
  command
      ->add_flag("--show-plan", flags->show_plan,
                 "the prompt's spans and where their states came from")
      ->group("Cache");
  command->callback(
      [=] { *action = [=] { return Generate(*globals, *flags); }; });
}

void AddCount(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<CountFlags>();
  CLI::App* command = app->add_subcommand(
      "count", "count a prompt's tokens and show its plan; computes nothing");
  flags->prompt.AddTo(command);
  AddMatch(command, &flags->match);
  command->callback([=] { *action = [=] { return Count(*globals, *flags); }; });
}

}  // namespace promptcache::cli

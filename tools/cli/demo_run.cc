#include "tools/cli/demo_run.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/status_macros.h"

namespace promptcache::cli {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

double DemoPrompt::ttft_full_ms() const { return Median(full_ms); }
double DemoPrompt::ttft_cached_ms() const { return Median(cached_ms); }

std::vector<DemoMode> DemoModes() {
  return {{.name = "full attention",
           .key = "full",
           .cache_mode = v1::CACHE_MODE_BYPASS,
           .attention = v1::ATTENTION_MODE_FULL},
          {.name = "modules, no cache",
           .key = "bypass",
           .cache_mode = v1::CACHE_MODE_BYPASS},
          {.name = "cache, first time", .key = "first"},
          {.name = "cache, again", .key = "cached"}};
}

absl::StatusOr<DemoAnswer> RunAnswer(
    WorkerClient* worker, const std::string& pml, const DemoMode& mode,
    uint32_t max_tokens,
    const std::function<void(const std::string&)>& on_text) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_pml(pml);
  request.set_max_tokens(max_tokens);
  request.set_cache_mode(mode.cache_mode);
  request.set_attention(mode.attention);
  DemoAnswer answer;
  answer.mode = mode;
  const auto begin = std::chrono::steady_clock::now();
  PC_RETURN_IF_ERROR(
      worker->Generate(request, [&](const v1::GenerateResponse& event) {
        if (event.has_delta() || event.has_completed()) {
          if (answer.ttft_ms == 0) {
            answer.ttft_ms = std::chrono::duration<double, std::milli>(
                                 std::chrono::steady_clock::now() - begin)
                                 .count();
          }
        }
        if (event.has_delta()) {
          answer.text += event.delta().text();
          on_text(event.delta().text());
        }
        if (event.has_completed()) answer.completed = event.completed();
        return true;
      }));
  return answer;
}

absl::Status MeasureRepeats(WorkerClient* worker, uint32_t repeats,
                            const std::function<void(uint32_t)>& on_repeat,
                            DemoPrompt* prompt) {
  prompt->full_ms = {prompt->full().ttft_ms};
  prompt->cached_ms = {prompt->cached().ttft_ms};
  prompt->least_cached_tokens =
      prompt->cached().completed.usage().cached_tokens();
  const auto silent = [](const std::string&) {};
  for (uint32_t i = 1; i < repeats; ++i) {
    on_repeat(i);
    PC_ASSIGN_OR_RETURN(
        DemoAnswer full,
        RunAnswer(worker, prompt->pml, prompt->full().mode, 1, silent));
    prompt->full_ms.push_back(full.ttft_ms);
    PC_ASSIGN_OR_RETURN(
        DemoAnswer cached,
        RunAnswer(worker, prompt->pml, prompt->cached().mode, 1, silent));
    prompt->cached_ms.push_back(cached.ttft_ms);
    prompt->least_cached_tokens =
        std::min(prompt->least_cached_tokens,
                 uint32_t{cached.completed.usage().cached_tokens()});
  }
  return absl::OkStatus();
}

}  // namespace promptcache::cli

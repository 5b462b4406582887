#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/cli/demo_run.h"

namespace promptcache::cli {

// The table of one prompt's four answers, and what it means.
std::string DemoTable(const DemoPrompt& prompt);

// What is claimed at the end; the first prompt is the main comparison.
std::string DemoSummary(const std::vector<DemoPrompt>& prompts);

// Why the demo has failed, one sentence each; empty when it has shown what it
// should.
std::vector<std::string> DemoFaults(const std::vector<DemoPrompt>& prompts);

// `prompts[0]` gives the figures of the top level.
nlohmann::ordered_json DemoJson(const std::vector<DemoPrompt>& prompts,
                                const v1::ModelInfo& model);

}  // namespace promptcache::cli

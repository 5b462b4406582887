#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/chat_template.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"
#include "tools/cli/proto_json.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

Json InfoJson(const worker::ModelFile& file) {
  const worker::ModelConfig& c = file.config();
  const worker::VocabularyData& v = file.vocabulary();
  std::error_code ignored;
  Json json{{"path", file.path()},
            {"bytes", std::filesystem::file_size(file.path(), ignored)},
            {"name", c.name},
            {"architecture", c.architecture},
            {"layers", c.num_layers},
            {"hidden", c.hidden_dim},
            {"heads", c.num_heads},
            {"kv_heads", c.num_kv_heads},
            {"head_dim", c.head_dim},
            {"ffn", c.ffn_dim},
            {"context_tokens", c.context_length},
            {"rope_theta", c.rope.theta},
            {"rope_dims", c.rope.dims},
            {"tied_embeddings", c.tied_embeddings},
            {"vocabulary", v.tokens.size()},
            {"tokenizer", v.model},
            {"pre_tokenizer", v.pre_tokenizer},
            {"bos", v.bos_id},
            {"eos", v.eos_id},
            {"adds_bos", v.add_bos}};
  // Keys and values of one token in bf16.
  json["kv_bytes_per_token"] =
      uint64_t{4} * c.num_layers * c.num_kv_heads * c.head_dim;
  const auto chat = ChatTemplate::FromJinja(file.chat_template());
  json["chat_template"] = file.chat_template().empty() ? "none"
                          : chat.ok()                  ? chat->name()
                                                       : "unknown";
  auto tokenizer = worker::CreateTokenizer(file);
  json["tokenizer_problem"] =
      tokenizer.ok() ? "" : std::string(tokenizer.status().message());
  return json;
}

void PrintFields(const Json& json) {
  size_t width = 0;
  for (const auto& [name, value] : json.items()) {
    width = std::max(width, name.size());
  }
  for (const auto& [name, value] : json.items()) {
    const std::string text =
        value.is_string() ? value.get<std::string>() : value.dump();
    if (text.empty()) continue;
    std::cout << name << std::string(width + 2 - name.size(), ' ') << text
              << "\n";
  }
}

int Info(const Globals& globals, const std::string& model) {
  auto path = FindModel(model);
  if (!path.ok()) return Report(path.status(), globals.json);
  auto file = worker::OpenModelFile(*path, {});
  if (!file.ok()) {
    // A vocabulary without tensors is worth looking at, too.
    auto vocabulary = worker::OpenModelFile(*path, {.vocabulary_only = true});
    if (!vocabulary.ok()) return Report(file.status(), globals.json);
    file = std::move(vocabulary);
  }
  const Json json = InfoJson(**file);
  if (globals.json) {
    std::cout << json.dump(2) << "\n";
    return kExitOk;
  }
  PrintFields(json);
  return kExitOk;
}

int Served(const Globals& globals) {
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  auto info = (*worker)->GetModelInfo();
  if (!info.ok()) return Report(info.status(), globals.json);
  const Json json = ToJson(*info);
  if (globals.json) {
    std::cout << json.dump(2) << "\n";
    return kExitOk;
  }
  PrintFields(json);
  return kExitOk;
}

}  // namespace

void AddModel(CLI::App* app, const Globals* globals, Action* action) {
  CLI::App* model = app->add_subcommand("model", "look at models");
  model->require_subcommand(1);
  model->fallthrough();
  auto path = std::make_shared<std::string>();
  CLI::App* info =
      model->add_subcommand("info", "what a model holds; no server");
  info->add_option("file", *path,
                   "a GGUF file or a Hugging Face folder (the small model "
                   "that tools/fetch_model "
                   "fetched otherwise)");
  info->callback([=] { *action = [=] { return Info(*globals, *path); }; });
  CLI::App* served = model->add_subcommand("served", "what the worker serves");
  served->callback([=] { *action = [=] { return Served(*globals); }; });
}

}  // namespace promptcache::cli

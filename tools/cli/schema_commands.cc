#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"
#include "tools/cli/policy_flags.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

struct PutFlags {
  std::string file;
  PolicyFlags policy;
  std::vector<std::string> module_ttls;
  std::vector<std::string> module_pins;
  bool validate_only = false;
};

absl::StatusOr<v1::CreateSchemaRequest> PutRequest(const PutFlags& flags) {
  v1::CreateSchemaRequest request;
  auto text = ReadFile(flags.file);
  if (!text.ok()) return text.status();
  request.set_text(*text);
  request.set_validate_only(flags.validate_only);
  if (flags.policy.given()) {
    auto policy = flags.policy.Policy();
    if (!policy.ok()) return policy.status();
    *request.mutable_policy() = *policy;
  }
  auto& policies = *request.mutable_module_policies();
  for (const std::string& entry : flags.module_ttls) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) {
      return UsageError(absl::StrCat("--module-ttl ", entry,
                                     ": write PATH=TIME, docs/faq=10m"));
    }
    auto status =
        SetTtl(entry.substr(equals + 1), &policies[entry.substr(0, equals)]);
    if (!status.ok()) return status;
  }
  for (const std::string& path : flags.module_pins) {
    policies[path].set_pin(true);
  }
  return request;
}

void PrintPut(const v1::CreateSchemaResponse& response, bool validate_only) {
  const v1::Schema& schema = response.schema();
  if (validate_only) {
    std::cout << schema.name() << ": fine\n";
  } else {
    std::cout << schema.name() << ": revision " << schema.revision()
              << (response.created() ? "" : " (this text was there already)")
              << "\n";
  }
  std::vector<std::vector<std::string>> rows{{"module", "tokens", ""}};
  for (const auto& module : response.modules()) {
    rows.push_back({module.path().empty() ? "(preamble)" : module.path(),
                    WithCommas(module.num_tokens()),
                    module.cached() ? "" : "not cached"});
  }
  std::cout << FormatTable(rows, "  ");
  for (const auto& warning : response.warnings()) {
    std::cerr << "note: " << warning << "\n";
  }
  if (response.pins_refused().empty()) return;
  std::cerr << "note: not pinned, the daemon's pin budget has no room: ";
  const char* separator = "";
  for (const auto& path : response.pins_refused()) {
    std::cerr << std::exchange(separator, ", ")
              << (path.empty() ? "the preamble" : path);
  }
  std::cerr << "\n";
}

int Put(const Globals& globals, const PutFlags& flags) {
  auto request = PutRequest(flags);
  if (!request.ok()) return Report(request.status(), globals.json);
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  auto response = (*worker)->CreateSchema(*request);
  if (!response.ok()) {
    return Report(NamingFile(response.status(), "schema", flags.file),
                  globals.json);
  }
  if (globals.json) {
    std::cout << ToJson(*response).dump(2) << "\n";
  } else {
    PrintPut(*response, flags.validate_only);
  }
  return kExitOk;
}

int Get(const Globals& globals, const std::string& name, uint64_t revision) {
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  v1::GetSchemaRequest request;
  request.set_name(name);
  request.set_revision(revision);
  auto schema = (*worker)->GetSchema(request);
  if (!schema.ok()) return Report(schema.status(), globals.json);
  if (globals.json) {
    std::cout << ToJson(*schema).dump(2) << "\n";
  } else {
    std::cout << schema->text();
    if (StdoutIsTerminal()) std::cout << "\n";
  }
  return kExitOk;
}

std::string Date(const google::protobuf::Timestamp& t) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S",
                          absl::FromUnixSeconds(t.seconds()),
                          absl::LocalTimeZone());
}

int List(const Globals& globals) {
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  v1::ListSchemasRequest request;
  v1::ListSchemasResponse all;
  do {
    auto page = (*worker)->ListSchemas(request);
    if (!page.ok()) return Report(page.status(), globals.json);
    all.mutable_schemas()->MergeFrom(page->schemas());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  if (globals.json) {
    std::cout << ToJson(all)["schemas"].dump(2) << "\n";
    return kExitOk;
  }
  if (all.schemas().empty()) {
    std::cout << "no schemas; put one with `promptcache schema put FILE`\n";
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows{
      {"schema", "revision", "since", "text sha256", "policy"}};
  for (const auto& schema : all.schemas()) {
    std::string policy;
    if (schema.policy().has_ttl()) {
      policy = absl::StrCat("ttl ", schema.policy().ttl().seconds(), "s ");
    }
    if (schema.policy().pin()) policy += "pinned";
    rows.push_back({schema.name(), absl::StrCat(schema.revision()),
                    Date(schema.create_time()),
                    schema.text_sha256().substr(0, 12), policy});
  }
  std::cout << FormatTable(rows, "");
  return kExitOk;
}

int Remove(const Globals& globals, const std::string& name) {
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  v1::DeleteSchemaRequest request;
  request.set_name(name);
  if (auto status = (*worker)->DeleteSchema(request); !status.ok()) {
    return Report(status, globals.json);
  }
  if (globals.json) {
    std::cout << nlohmann::json{{"deleted", name}}.dump(2) << "\n";
  } else {
    std::cout << name << ": deleted, with all its revisions\n";
  }
  return kExitOk;
}

void AddPut(CLI::App* schema, const Globals* globals, Action* action) {
  auto flags = std::make_shared<PutFlags>();
  CLI::App* put = schema->add_subcommand(
      "put", "register a schema, or a new revision of it");
  put->add_option("file", flags->file, "a PML schema; - is standard input")
      ->required();
  flags->policy.AddTo(put);
  put->add_option("--module-ttl", flags->module_ttls,
                  "PATH=TIME: a time to live for one module; repeatable")
      ->allow_extra_args(false);
  put->add_option("--module-pin", flags->module_pins,
                  "PATH: pin one module; repeatable")
      ->allow_extra_args(false);
  put->add_flag("--validate-only", flags->validate_only,
                "judge the text, keep nothing");
  put->callback([=] { *action = [=] { return Put(*globals, *flags); }; });
}

}  // namespace

void AddSchema(CLI::App* app, const Globals* globals, Action* action) {
  CLI::App* schema = app->add_subcommand(
      "schema",
      "put, get, list and remove schemas: the documents that name "
      "reusable modules");
  schema->require_subcommand(1);
  schema->fallthrough();
  AddPut(schema, globals, action);

  auto name = std::make_shared<std::string>();
  auto revision = std::make_shared<uint64_t>(0);
  CLI::App* get = schema->add_subcommand("get", "print a schema's text");
  get->add_option("name", *name, "the schema")->required();
  get->add_option("--revision", *revision, "an older one; 0: the current one");
  get->callback(
      [=] { *action = [=] { return Get(*globals, *name, *revision); }; });

  CLI::App* list = schema->add_subcommand("list", "list all schemas");
  list->callback([=] { *action = [=] { return List(*globals); }; });

  CLI::App* rm =
      schema->add_subcommand("rm", "delete a schema with all its revisions");
  rm->add_option("name", *name, "the schema")->required();
  rm->callback([=] { *action = [=] { return Remove(*globals, *name); }; });
}

}  // namespace promptcache::cli

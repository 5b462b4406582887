#include "tools/cli/cache_commands.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/placement_text.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

// The schema under which workers keep what `retain` leaves.
constexpr char kRetainedSchema[] = "~prefix";

absl::Status CheckPath(const std::string& path, const std::string& schema) {
  if (path.empty() || !schema.empty()) return absl::OkStatus();
  return UsageError("--path needs --schema: paths are a schema's own");
}

// For what the daemon answered about a schema that it does not know.
absl::Status NoSchema(const std::string& schema) {
  return absl::NotFoundError(absl::StrCat(
      "no schema \"", schema, "\"; promptcache schema list has all"));
}

// NotFound when what the filter names was never in the cache: a key, a schema,
// a schema's path. Modules that are known but absent now are there.
absl::Status CheckNamed(DaemonClient* daemon, const v1::ModuleFilter& filter) {
  for (const std::string& key : filter.keys()) {
    if (auto module = daemon->GetModule(key); !module.ok()) {
      return module.status();
    }
  }
  if (filter.schema().empty()) return absl::OkStatus();
  v1::ListModulesRequest request;
  request.mutable_filter()->set_schema(filter.schema());
  request.mutable_filter()->set_path(filter.path());
  request.set_include_absent(true);
  request.set_page_size(1);
  auto list = daemon->ListModules(request);
  if (!list.ok()) return list.status();
  if (!list->modules().empty()) return absl::OkStatus();
  if (list->unknown_schema()) return NoSchema(filter.schema());
  if (filter.path().empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no module \"", filter.path(),
                                          "\" of schema \"", filter.schema(),
                                          "\" was ever in the cache"));
}

// Which modules: --all, --schema NAME [--path PATH], or keys.
struct Selection {
  std::vector<std::string> keys;
  std::string schema;
  std::string path;
  bool all = false;

  void AddTo(CLI::App* command) {
    command->add_option("keys", keys,
                        "module keys, or beginnings of at least 8 digits");
    command->add_option("--schema", schema, "modules of this schema");
    command->add_option("--path", path, "with --schema: this module only");
    command->add_flag("--all", all, "every module");
  }
  absl::StatusOr<v1::ModuleFilter> Filter() const {
    if (auto status = CheckPath(path, schema); !status.ok()) return status;
    if (keys.empty() && schema.empty() && !all) {
      return UsageError("which modules? Give keys, --schema NAME or --all");
    }
    v1::ModuleFilter filter;
    filter.set_all(all);
    for (const std::string& key : keys) filter.add_keys(key);
    filter.set_schema(schema);
    filter.set_path(path);
    return filter;
  }
};

std::string ClockTime(const google::protobuf::Timestamp& t) {
  return absl::FormatTime(
      "%H:%M:%S",
      absl::FromUnixSeconds(t.seconds()) + absl::Nanoseconds(t.nanos()),
      absl::LocalTimeZone());
}

std::string Ago(const google::protobuf::Timestamp& t) {
  if (t.seconds() == 0) return "-";
  const absl::Duration d = absl::Now() - absl::FromUnixSeconds(t.seconds());
  return absl::FormatDuration(absl::Trunc(d, absl::Seconds(1))) + " ago";
}

std::string ModulePath(const v1::Module& module) {
  return absl::StrCat(module.schema(), " / ",
                      module.path().empty() ? "(preamble)" : module.path());
}

std::string ModuleTable(const v1::ListModulesResponse& list) {
  std::vector<std::vector<std::string>> rows{{"key", "module", "tokens",
                                              "bytes", "state", "tier", "hits",
                                              "last use", ""}};
  for (const auto& m : list.modules()) {
    std::string note = m.pinned() ? "pinned" : "";
    if (m.absence() != v1::MISS_REASON_UNSPECIFIED) {
      note = absl::StrCat("absent: ",
                          EnumWord(v1::MissReason_descriptor(), m.absence()));
    }
    if (m.num_leases() > 0) {
      absl::StrAppend(&note, note.empty() ? "" : ", ", m.num_leases(),
                      " leases");
    }
    rows.push_back({m.key().substr(0, 12), ModulePath(m),
                    WithCommas(m.num_tokens()), HumanBytes(m.bytes()),
                    EnumWord(v1::ModuleState_descriptor(), m.state()),
                    PlacementText(m), WithCommas(m.hits()),
                    Ago(m.last_use_time()), note});
  }
  const bool retained = std::any_of(
      list.modules().begin(), list.modules().end(),
      [](const v1::Module& m) { return m.schema() == kRetainedSchema; });
  return absl::StrCat(FormatTable(rows, ""),
                      retained ? "~prefix: chunks of 64 tokens of prompts and "
                                 "answers that --retain left here\n"
                               : "");
}

struct ModulesFlags {
  std::string key;
  std::string schema;
  std::string path;
  bool absent = false;
};

absl::StatusOr<v1::ListModulesResponse> ListAll(
    DaemonClient* daemon, v1::ListModulesRequest request) {
  v1::ListModulesResponse all;
  request.set_page_size(1000);
  do {
    auto page = daemon->ListModules(request);
    if (!page.ok()) return page.status();
    all.mutable_modules()->MergeFrom(page->modules());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return all;
}

int Modules(const Globals& globals, const ModulesFlags& flags) {
  if (auto status = CheckPath(flags.path, flags.schema); !status.ok()) {
    return Report(status, globals.json);
  }
  auto daemon = globals.ConnectDaemon();
  if (!daemon.ok()) return Report(daemon.status(), globals.json);
  if (!flags.key.empty()) {
    auto module = (*daemon)->GetModule(flags.key);
    if (!module.ok()) return Report(module.status(), globals.json);
    const auto json = ToJson(*module);
    if (globals.json) {
      std::cout << json.dump(2) << "\n";
      return kExitOk;
    }
    for (const auto& [name, value] : json.items()) {
      std::cout << name << ": "
                << (value.is_string() ? value.get<std::string>() : value.dump())
                << "\n";
    }
    return kExitOk;
  }
  v1::ListModulesRequest request;
  request.set_include_absent(flags.absent);
  if (!flags.schema.empty()) {
    request.mutable_filter()->set_schema(flags.schema);
    request.mutable_filter()->set_path(flags.path);
  }
  if (auto named = CheckNamed(daemon->get(), request.filter()); !named.ok()) {
    return Report(named, globals.json);
  }
  auto list = ListAll(daemon->get(), request);
  if (!list.ok()) return Report(list.status(), globals.json);
  if (globals.json) {
    std::cout << ToJson(*list)["modules"].dump(2) << "\n";
  } else if (list->modules().empty()) {
    std::cout << "no modules"
              << (flags.absent ? ""
                               : " in the cache; --absent lists known ones")
              << "\n";
  } else {
    std::cout << ModuleTable(*list);
  }
  return kExitOk;
}

int Evict(const Globals& globals, const Selection& selection) {
  auto filter = selection.Filter();
  if (!filter.ok()) return Report(filter.status(), globals.json);
  auto daemon = globals.ConnectDaemon();
  if (!daemon.ok()) return Report(daemon.status(), globals.json);
  if (auto named = CheckNamed(daemon->get(), *filter); !named.ok()) {
    return Report(named, globals.json);
  }
  v1::EvictModulesRequest request;
  *request.mutable_filter() = *filter;
  auto response = (*daemon)->EvictModules(request);
  if (!response.ok()) return Report(response.status(), globals.json);
  if (globals.json) {
    std::cout << ToJson(*response).dump(2) << "\n";
  } else {
    std::cout << "evicted " << WithCommas(response->num_evicted())
              << " modules, " << HumanBytes(response->bytes());
    if (response->num_deferred() > 0) {
      std::cout << "; " << WithCommas(response->num_deferred())
                << " go when their last reader is done";
    }
    std::cout << "\n";
  }
  return kExitOk;
}

int Pin(const Globals& globals, const Selection& selection, bool unpin) {
  auto filter = selection.Filter();
  if (!filter.ok()) return Report(filter.status(), globals.json);
  auto daemon = globals.ConnectDaemon();
  if (!daemon.ok()) return Report(daemon.status(), globals.json);
  if (auto named = CheckNamed(daemon->get(), *filter); !named.ok()) {
    return Report(named, globals.json);
  }
  v1::PinModulesRequest request;
  *request.mutable_filter() = *filter;
  request.set_unpin(unpin);
  auto response = (*daemon)->PinModules(request);
  if (!response.ok()) return Report(response.status(), globals.json);
  if (globals.json) {
    std::cout << ToJson(*response).dump(2) << "\n";
  } else {
    std::cout << (unpin ? "unpinned " : "pinned ")
              << WithCommas(response->num_changed()) << " modules";
    if (response->num_unchanged() > 0) {
      std::cout << ", " << WithCommas(response->num_unchanged())
                << (unpin ? " were not pinned" : " were pinned already");
    }
    std::cout << "; " << HumanBytes(response->pinned_bytes()) << " of "
              << HumanBytes(response->pin_budget_bytes()) << " are pinned\n";
  }
  if (response->num_refused() == 0) return kExitOk;
  std::cerr << "promptcache: not pinned, the daemon's pin budget has no room: "
            << WithCommas(response->num_refused()) << " modules\n";
  return kExitRefused;
}

std::string EventText(const v1::CacheEvent& event) {
  std::string out =
      absl::StrCat(ClockTime(event.time()), "  ",
                   EnumWord(v1::CacheEvent::Kind_descriptor(), event.kind()));
  if (!event.key().empty()) {
    absl::StrAppend(&out, "  ", event.key().substr(0, 12), "  ", event.schema(),
                    " / ", event.path().empty() ? "(preamble)" : event.path());
  } else if (!event.schema().empty()) {
    absl::StrAppend(&out, "  ", event.schema());
  }
  const std::string tier = TierText(event.tier(), event.device_uuid());
  const std::string reason =
      EnumWord(v1::EvictReason_descriptor(), event.evict_reason());
  if (!tier.empty()) absl::StrAppend(&out, "  ", tier);
  if (!reason.empty()) absl::StrAppend(&out, "  ", reason);
  if (event.bytes() > 0) absl::StrAppend(&out, "  ", HumanBytes(event.bytes()));
  if (event.session_id() > 0) {
    absl::StrAppend(&out, "  session ", event.session_id());
  }
  if (event.missed_events() > 0) {
    absl::StrAppend(&out, "  ", event.missed_events(),
                    " events were lost: this reader was too slow");
  }
  if (!event.detail().empty()) absl::StrAppend(&out, "  ", event.detail());
  return out;
}

int Events(const Globals& globals, uint64_t count) {
  auto daemon = globals.ConnectDaemon();
  if (!daemon.ok()) return Report(daemon.status(), globals.json);
  uint64_t seen = 0;
  const absl::Status status =
      (*daemon)->WatchEvents([&](const v1::CacheEvent& event) {
        std::cout << (globals.json ? ToJson(event).dump() : EventText(event))
                  << "\n"
                  << std::flush;
        return count == 0 || ++seen < count;
      });
  return Report(status, globals.json);
}

}  // namespace

void AddModules(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<ModulesFlags>();
  CLI::App* command = app->add_subcommand(
      "modules", "list the modules of the cache, or inspect one");
  command->add_option("key", flags->key, "a module's key: all about it");
  command->add_option("--schema", flags->schema, "only those of this schema");
  command->add_option("--path", flags->path, "with --schema: only this one");
  command->add_flag("--absent", flags->absent,
                    "known but not resident ones too, with the reason");
  command->callback(
      [=] { *action = [=] { return Modules(*globals, *flags); }; });
}

void AddEvict(CLI::App* app, const Globals* globals, Action* action) {
  auto selection = std::make_shared<Selection>();
  CLI::App* command =
      app->add_subcommand("evict", "drop modules from the cache");
  selection->AddTo(command);
  command->callback(
      [=] { *action = [=] { return Evict(*globals, *selection); }; });
}

void AddPin(CLI::App* app, const Globals* globals, Action* action) {
  auto selection = std::make_shared<Selection>();
  auto unpin = std::make_shared<bool>(false);
  CLI::App* command = app->add_subcommand(
      "pin", "keep modules whatever else comes, or let them go again");
  selection->AddTo(command);
  command->add_flag("--unpin", *unpin, "let them go again");
  command->callback(
      [=] { *action = [=] { return Pin(*globals, *selection, *unpin); }; });
}

void AddEvents(CLI::App* app, const Globals* globals, Action* action) {
  auto count = std::make_shared<uint64_t>(0);
  CLI::App* command = app->add_subcommand(
      "events", "commits, moves, evictions and sessions as they happen");
  command->add_option("--count", *count, "end after this many; 0: never");
  command->callback(
      [=] { *action = [=] { return Events(*globals, *count); }; });
}

void AddCache(CLI::App* app, const Globals* globals, Action* action) {
  AddModules(app, globals, action);
  AddStats(app, globals, action);
  AddEvict(app, globals, action);
  AddPin(app, globals, action);
  AddEvents(app, globals, action);
}

}  // namespace promptcache::cli

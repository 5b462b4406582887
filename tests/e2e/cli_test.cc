#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;

struct CliResult {
  std::string ended;  // "exit status 0"
  std::string out;
  std::string error;
  Json json() const { return Json::parse(out, nullptr, false); }
};

class CliTest : public NodeTest {
 protected:
  // Starts `promptcache ARGS`, standard output and error kept apart.
  absl::StatusOr<ChildProcess> StartCli(std::vector<std::string> args) {
    base_ = absl::StrCat(dir(), "/cli", runs_++);
    args.insert(
        args.begin(),
        {"-c", shell_ + "exec \"$0\" \"$@\" 2>" + base_ + ".err </dev/null",
         std::string(PROMPTCACHE_BIN) + "promptcache"});
    return ChildProcess::Start({.program = "/bin/sh",
                                .args = std::move(args),
                                .log_path = base_ + ".out"});
  }
  CliResult Cli(std::vector<std::string> args) {
    auto process = StartCli(std::move(args));
    if (!process.ok()) return {.ended = process.status().ToString()};
    auto ended = process->Wait(absl::Seconds(200));
    return {.ended = ended.ok() ? *ended : ended.status().ToString(),
            .out = process->Log(),
            .error = ReadFileOrDie(base_ + ".err")};
  }
  // A server that ends by itself; what it says is in `out`.
  CliResult Server(const std::string& program,
                   const std::vector<std::string>& flags) {
    auto process = ChildProcess::Start(
        {.program = PROMPTCACHE_BIN + program,
         .args = flags,
         .log_path = absl::StrCat(dir(), "/server", runs_++)});
    if (!process.ok()) return {.ended = process.status().ToString()};
    auto ended = process->Wait(absl::Seconds(60));
    return {.ended = ended.ok() ? *ended : ended.status().ToString(),
            .out = process->Log(),
            .error = ""};
  }
  std::string File(const std::string& name, const std::string& text) {
    const std::string path = dir() + "/" + name;
    std::ofstream(path) << text;
    return path;
  }

  std::string shell_;  // what a shell does before each command: "ulimit ...;"
  std::string base_;
  int runs_ = 0;
};

TEST_F(CliTest, SaysWhichServerDoesNotAnswerAndHowToStartIt) {
  const CliResult result = Cli({"generate", "--text", "x", "--worker",
                                "127.0.0.1:1", "--connect-timeout", "0.2"});
  EXPECT_EQ(result.ended, "exit status 3");
  EXPECT_THAT(result.error, HasSubstr("127.0.0.1:1"));
  EXPECT_THAT(result.error, HasSubstr("promptcache up"));
  EXPECT_EQ(
      Cli({"stats", "--daemon", "127.0.0.1:1", "--connect-timeout", "0.2"})
          .ended,
      "exit status 3");
}

TEST_F(CliTest, AQuestionInPlaceOfAFileIsToldHowToBeAsked) {
  const CliResult result = Cli({"generate", "Why is the sky blue?"});
  EXPECT_EQ(result.ended, "exit status 4");
  EXPECT_THAT(result.error, HasSubstr("no file Why is the sky blue?"));
  EXPECT_THAT(result.error, HasSubstr("--message user:TEXT"));
}

TEST_F(CliTest, AWrongCommandLineIsExitTwo) {
  EXPECT_EQ(Cli({"generate", "--no-such-flag"}).ended, "exit status 2");
  EXPECT_EQ(Cli({}).ended, "exit status 2");
  EXPECT_EQ(Cli({"generate", "--message", "clown:hello"}).ended,
            "exit status 2");
  EXPECT_EQ(Cli({"evict"}).ended, "exit status 2");
  EXPECT_EQ(Cli({"--help"}).ended, "exit status 0");
  EXPECT_THAT(Cli({"generate", "--help"}).out, HasSubstr("--connect-timeout"));
  EXPECT_THAT(Cli({"bogus"}).error, HasSubstr("unknown command bogus"));
  EXPECT_THAT(
      Cli({"schema", "bogus"}).error,
      HasSubstr("unknown command bogus; see promptcache schema --help"));
  EXPECT_THAT(Cli({}).error, HasSubstr("no command is given"));
}

TEST_F(CliTest, AServersWrongCommandLineIsExitTwoAndOneLine) {
  for (const char* server : {"promptcache-daemon", "promptcache-worker"}) {
    CliResult result = Server(server, {"--nosuch=1"});
    EXPECT_EQ(result.ended, "exit status 2") << server;
    EXPECT_EQ(result.out, "ERROR: Unknown command line flag 'nosuch'\n");
    result = Server(server, {"stray"});
    EXPECT_EQ(result.ended, "exit status 2") << server;
    EXPECT_EQ(result.out, "ERROR: Unexpected argument 'stray'\n");
  }
  const CliResult result = Server("promptcache-worker", {});
  EXPECT_EQ(result.ended, "exit status 2");
  EXPECT_THAT(result.out,
              StartsWith("\npromptcache-worker: --model is not set: "));
}

TEST_F(CliTest, APortThatIsNoneIsAWrongCommandLine) {
  for (const char* flag : {"--worker", "--daemon"}) {
    for (const char* command : {"stats", "up"}) {
      const CliResult result = Cli({command, flag, "127.0.0.1:80000"});
      EXPECT_EQ(result.ended, "exit status 2") << command;
      EXPECT_THAT(result.error,
                  HasSubstr(absl::StrCat(flag,
                                         ": the address \"127.0.0.1:80000"
                                         "\" has the port 80000: ports end at "
                                         "65535")));
    }
  }
  const std::string listen = "--listen=127.0.0.1:80000";
  CliResult result =
      Server("promptcache-worker", {listen, "--model=none", "--device=cpu"});
  EXPECT_EQ(result.ended, "exit status 2");
  EXPECT_THAT(result.out,
              HasSubstr("promptcache-worker: --listen: the address"));
  result = Server("promptcache-daemon",
                  {listen, "--device=cpu", "--socket=" + dir() + "/d.sock",
                   "--db=" + dir() + "/registry.db"});
  EXPECT_EQ(result.ended, "exit status 2");
  EXPECT_THAT(result.out,
              HasSubstr("promptcache-daemon: --listen: the address"));
}

TEST_F(CliTest, AWrongCommandLineIsJsonToo) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"--json", "bogus"},
        {"--json", "schema", "put"},
        {"stats", "--interval", "0", "--json"},
        {"--json", "generate", "--max-tokens", "0"},
        {"--json", "modules", "--path", "a"},
        {"--json", "generate", "--text", ""},
        {"--json", "generate"}}) {  // nothing on standard input
    const CliResult result = Cli(args);
    EXPECT_EQ(result.ended, "exit status 2") << result.error;
    const Json json = result.json();
    ASSERT_TRUE(json.is_object()) << result.out;
    EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT") << result.out;
    EXPECT_NE(json["error"]["message"], "") << result.out;
  }
  EXPECT_THAT(Cli({"generate", "--text", ""}).error,
              HasSubstr("the prompt is empty"));
  const std::string prompt = File("prompt.xml", "<prompt schema=\"lib\"/>");
  EXPECT_THAT(Cli({"generate", prompt, "--retain"}).error,
              HasSubstr("--retain is for --text and --message"));
}

TEST_F(CliTest, PmlCheckPrintsPlansAndErrors) {
  UseTinyModel();
  const std::string schema = File("schema.xml", SmallSchema("lib"));
  const std::string good =
      File("good.xml", "<prompt schema=\"lib\"><a/><user>x</user></prompt>");
  const std::string bad =
      File("bad.xml", "<prompt schema=\"lib\">\n <q/></prompt>");
  CliResult result = Cli({"pml", "check", "--schema", schema, "--model",
                          model_path(), good, "--json"});
  EXPECT_EQ(result.ended, "exit status 0") << result.error;
  EXPECT_EQ(result.json()["exactness"], "EXACT") << result.out;
  result = Cli({"pml", "check", "--schema", schema, "--model", model_path(),
                bad, "--json"});
  EXPECT_EQ(result.ended, "exit status 1");
  const Json error = result.json()["error"];
  EXPECT_EQ(error["reason"], "PML_UNKNOWN_MODULE") << result.out;
  EXPECT_EQ(error["in"], "prompt");
  EXPECT_EQ(error["line"], 2);
  EXPECT_EQ(error["column"], 2);
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("q"));
  result =
      Cli({"pml", "check", "--schema", schema, "--model", model_path(), bad});
  EXPECT_THAT(result.out, HasSubstr("bad.xml:2:2: PML_UNKNOWN_MODULE"));
  result = Cli({"pml", "check", "--schema", schema, "--model", model_path(),
                "--max-modules", "2"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.out, HasSubstr("PML_LIMIT"));
}

TEST_F(CliTest, EveryCommandTalksToTheServers) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.end(), {"--json", "--worker", worker->address(),
                             "--daemon", daemon_address()});
    CliResult result = Cli(std::move(args));
    EXPECT_EQ(result.ended, "exit status 0") << result.error;
    return result.json();
  };
  const std::string schema = File("schema.xml", SmallSchema("lib"));
  const std::string prompt =
      File("prompt.xml", "<prompt schema=\"lib\"><a/><user>x</user></prompt>");
  EXPECT_EQ(run({"schema", "put", schema, "--ttl", "1h"})["created"], true);
  EXPECT_EQ(run({"schema", "put", schema})["created"], false);
  EXPECT_EQ(run({"schema", "list"})[0]["name"], "lib");
  EXPECT_EQ(run({"schema", "get", "lib"})["text"], SmallSchema("lib"));
  EXPECT_GT(run({"count", prompt})["cacheable_tokens"], 0);
  const Json missed = run(
      {"generate", prompt, "--max-tokens", "1", "--cache-mode", "read-only"});
  ASSERT_EQ(missed["misses"].size(), 2u) << missed;
  EXPECT_EQ(missed["misses"][1]["path"], "a");
  EXPECT_EQ(missed["misses"][1]["reason"], "never_seen");
  EXPECT_THAT(Cli({"generate", prompt, "--max-tokens", "1", "--cache-mode",
                   "read-only", "--worker", worker->address()})
                  .error,
              HasSubstr("miss: a, "));
  EXPECT_GE(run({"warm", "lib"})["modules_done"], 4);
  const Json answer =
      run({"generate", prompt, "--max-tokens", "4", "--ignore-eos"});
  EXPECT_EQ(answer["tokens"].size(), 4u) << answer;
  EXPECT_GT(answer["usage"]["cached_tokens"], 0) << answer;
  EXPECT_EQ(answer["misses"].size(), 0u) << answer;
  EXPECT_EQ(run({"model", "served"})["daemon_attached"], true);
  EXPECT_GT(run({"stats"})["commits"], 0);
  const Json modules = run({"modules", "--schema", "lib"});
  ASSERT_GE(modules.size(), 4u);
  EXPECT_EQ(run({"modules", modules[0]["key"]})["key"], modules[0]["key"]);
  // A policy reaches modules that are in the cache already.
  EXPECT_EQ(modules[0]["pinned"], false) << modules[0];
  EXPECT_GT(run({"warm", "lib", "--pin"})["already_cached"], 0);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
    return run({"modules", modules[0]["key"]})["pinned"] == true;
  }));
  run({"pin", "--schema", "lib", "--unpin"});
  EXPECT_GT(run({"pin", "--schema", "lib"})["num_changed"], 0);
  EXPECT_GT(run({"pin", "--schema", "lib", "--unpin"})["num_changed"], 0);
  EXPECT_GE(run({"evict", "--schema", "lib"})["num_evicted"], 4);
  EXPECT_EQ(run({"modules"}).size(), 0u);
  EXPECT_GE(run({"modules", "--absent"}).size(), 4u);
  run({"schema", "rm", "lib"});
  EXPECT_EQ(run({"schema", "list"}).size(), 0u);
}

TEST_F(CliTest, WhatIsRetainedIsExplained) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.end(),
                {"--worker", worker->address(), "--daemon", daemon_address()});
    CliResult result = Cli(std::move(args));
    EXPECT_EQ(result.ended, "exit status 0") << result.error;
    return result;
  };
  std::string text;
  for (int i = 0; i < 60; ++i) absl::StrAppend(&text, "line ", i, ". ");
  EXPECT_THAT(run({"generate", "--text", text, "--max-tokens", "1"}).error,
              Not(HasSubstr("retained")));
  EXPECT_THAT(run({"stats"}).out, HasSubstr("so these are no misses"));
  EXPECT_THAT(
      run({"generate", "--text", "x", "--max-tokens", "1", "--retain"}).error,
      HasSubstr("note: nothing retained: fewer than 64 tokens"));
  EXPECT_THAT(run({"modules"}).out, Not(HasSubstr("~prefix")));
  EXPECT_THAT(
      run({"generate", "--text", text, "--max-tokens", "1", "--retain"}).error,
      HasSubstr(" tokens of prompt and answer stay in the cache"));
  EXPECT_THAT(run({"modules"}).out, HasSubstr("~prefix: chunks of 64 tokens"));
  const std::string stats = run({"stats"}).out;
  EXPECT_THAT(stats, HasSubstr("mapped    device tier: memory of the CPU"));
  EXPECT_THAT(stats, HasSubstr("now       workers 1, "));
}

TEST_F(CliTest, CountFindsModulesInAText) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  const std::string text = "A rule that is longer than thirty-two bytes.";
  PC_ASSERT_OK(worker->PutSchema("<schema name=\"lib\"><module name=\"a\">" +
                                 text + "</module></schema>"));
  const auto cacheable = [&](const std::string& match) {
    const CliResult result =
        Cli({"count", "--text", text + " And?", "--match", match, "--json",
             "--worker", worker->address()});
    EXPECT_EQ(result.ended, "exit status 0") << result.error;
    return result.json()["cacheable_tokens"].get<int>();
  };
  EXPECT_EQ(cacheable("none"), 0);
  EXPECT_GT(cacheable("auto"), 0);
}

// The complete lines of what a running command has written.
std::vector<std::string> LinesOf(const ChildProcess& process) {
  std::vector<std::string> lines = absl::StrSplit(process.Log(), '\n');
  lines.pop_back();
  return lines;
}

TEST_F(CliTest, EventsEndAfterTheirCount) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  auto events = StartCli(
      {"events", "--count", "3", "--json", "--daemon", daemon_address()});
  PC_ASSERT_OK(events);
  // Something happens until it has seen three.
  int revision = 0;
  ASSERT_TRUE(Eventually(absl::Seconds(60), [&] {
    PC_EXPECT_OK(worker->PutSchema(BigSchema("lib", ++revision)));
    return !events->Running();
  }));
  EXPECT_THAT(events->Wait(absl::Seconds(1)), IsOkAndHolds("exit status 0"));
  const std::vector<std::string> lines = LinesOf(*events);
  ASSERT_EQ(lines.size(), 3u) << events->Log();
  for (const std::string& line : lines) {
    const Json event = Json::parse(line, nullptr, false);
    ASSERT_TRUE(event.is_object()) << line;
    EXPECT_EQ(event["kind"], "schema_changed");
    EXPECT_EQ(event["schema"], "lib");
  }
}

TEST_F(CliTest, WatchedStatisticsAreALineEach) {
  UseTinyModel();
  StartDaemon();
  auto watch = StartCli({"stats", "--watch", "--interval", "0.05", "--json",
                         "--daemon", daemon_address()});
  PC_ASSERT_OK(watch);
  const auto sessions = [&] {
    const auto lines = LinesOf(*watch);
    const Json last =
        lines.empty() ? Json() : Json::parse(lines.back(), nullptr, false);
    return last.is_object() ? last["num_sessions"].get<int>() : -1;
  };
  ASSERT_TRUE(Eventually(absl::Seconds(30), [&] { return sessions() == 0; }));
  // It goes on, and sees what changes.
  auto worker = StartWorker();
  WaitAttached(worker.get());
  EXPECT_TRUE(Eventually(absl::Seconds(30), [&] { return sessions() == 1; }));
  for (const std::string& line : LinesOf(*watch)) {
    EXPECT_TRUE(Json::parse(line, nullptr, false).is_object()) << line;
  }
  EXPECT_TRUE(watch->Running());
  PC_ASSERT_OK(daemon().Signal(SIGKILL));
  EXPECT_THAT(watch->Wait(absl::Seconds(60)), IsOkAndHolds("exit status 3"));
}

TEST_F(CliTest, WarmingThatKeepsNothingIsExitOne) {
  UseTinyModel();
  auto worker = StartWorker();
  StartDaemon({"--device_bytes=1MiB", "--segment_bytes=1MiB"});
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(BigSchema("big", 1500)));
  const CliResult result = Cli({"warm", "big", "--worker", worker->address()});
  EXPECT_EQ(result.ended, "exit status 1") << result.out;
  EXPECT_THAT(result.error, HasSubstr("are not in the cache"));
}

TEST_F(CliTest, APinOverTheBudgetIsSaid) {
  UseTinyModel();
  StartDaemon({"--pin_budget_bytes=0"});
  auto worker = StartWorker();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(SmallSchema("lib")));
  const CliResult warmed =
      Cli({"warm", "lib", "a", "--pin", "--worker", worker->address()});
  EXPECT_EQ(warmed.ended, "exit status 0") << warmed.error;
  EXPECT_THAT(warmed.error, HasSubstr("note: not pinned, the daemon's pin "
                                      "budget has no room: "));
  EXPECT_THAT(Cli({"stats", "--daemon", daemon_address()}).out,
              HasSubstr("refused: the budget is full"));
}

TEST_F(CliTest, APinOverTheBudgetIsSaidOfModulesThatAreThere) {
  UseTinyModel();
  StartDaemon({"--pin_budget_bytes=0"});
  auto worker = StartWorker();
  WaitAttached(worker.get());
  const std::string schema = File("schema.xml", SmallSchema("lib"));
  const std::string to = worker->address();
  EXPECT_EQ(Cli({"schema", "put", schema, "--worker", to}).ended,
            "exit status 0");
  EXPECT_EQ(Cli({"warm", "lib", "--worker", to}).ended, "exit status 0");
  const Json warmed =
      Cli({"warm", "lib", "a", "--pin", "--json", "--worker", to}).json();
  EXPECT_EQ(warmed["already_cached"], 2) << warmed;  // and the preamble
  ASSERT_EQ(warmed["notices"].size(), 1u) << warmed;
  EXPECT_EQ(warmed["notices"][0],
            "not pinned, the daemon's pin budget has no room: a");
  EXPECT_THAT(Cli({"schema", "put", schema, "--pin", "--worker", to}).error,
              HasSubstr("note: not pinned, the daemon's pin budget has no "
                        "room: "));
  const CliResult pinned = Cli({"pin", "--schema", "lib", "--path", "a",
                                "--json", "--daemon", daemon_address()});
  EXPECT_EQ(pinned.ended, "exit status 4");
  EXPECT_EQ(pinned.json()["num_refused"], 1) << pinned.out;
  EXPECT_THAT(pinned.error, HasSubstr("the daemon's pin budget has no room"));
}

TEST_F(CliTest, WhatIsNamedAndNotThereIsExitFour) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(SmallSchema("lib")));
  const std::string prompt = File("prompt.xml", "<prompt schema=\"nosuch\"/>");
  using Args = std::vector<std::string>;
  const std::vector<std::pair<Args, std::string>> cases = {
      {{"modules", "--schema", "nosuch"}, "no schema \"nosuch\""},
      {{"evict", "--schema", "nosuch"}, "no schema \"nosuch\""},
      {{"pin", "--schema", "nosuch"}, "no schema \"nosuch\""},
      {{"warm", "nosuch"}, "no schema \"nosuch\""},
      {{"schema", "get", "nosuch"}, "no schema \"nosuch\""},
      {{"schema", "rm", "nosuch"}, "no schema \"nosuch\""},
      {{"generate", prompt}, "no schema \"nosuch\""},
      {{"modules", "--schema", "lib", "--path", "q"}, "no module \"q\""},
      {{"evict", "--schema", "lib", "--path", "q"}, "no module \"q\""},
      {{"pin", "--schema", "lib", "--path", "q"}, "no module \"q\""},
      {{"warm", "lib", "q"}, "no module \"q\""},
      {{"modules", "deadbeef00"}, "no module's key begins with deadbeef00"},
      {{"evict", "deadbeef00"}, "no module's key begins with deadbeef00"},
      {{"pin", "deadbeef00"}, "no module's key begins with deadbeef00"},
      {{"generate", "nosuch.xml"}, "no file nosuch.xml"},
      {{"schema", "put", "nosuch.xml"}, "no file nosuch.xml"},
  };
  for (auto [args, words] : cases) {
    const std::string what = absl::StrJoin(args, " ");
    args.insert(args.end(),
                {"--worker", worker->address(), "--daemon", daemon_address()});
    const CliResult result = Cli(args);
    EXPECT_EQ(result.ended, "exit status 4") << what;
    EXPECT_THAT(result.error, HasSubstr(words)) << what;
  }
  // What is known, and not in the cache now, is there: nothing to be done.
  const std::string to = worker->address();
  EXPECT_EQ(Cli({"warm", "lib", "--worker", to}).ended, "exit status 0");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Cli({"evict", "--schema", "lib", "--path", "a", "--daemon",
                   daemon_address()})
                  .ended,
              "exit status 0");
  }
}

TEST_F(CliTest, AServersRefusalIsExitFour) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  const std::string bad =
      File("bad.xml", "<schema name=\"x\"><module name=\"a b\"/></schema>");
  const CliResult result =
      Cli({"schema", "put", bad, "--worker", worker->address(), "--json"});
  EXPECT_EQ(result.ended, "exit status 4");
  EXPECT_EQ(result.json()["error"]["reason"], "PML_BAD_NAME") << result.out;
  EXPECT_EQ(result.json()["error"]["line"], 1);
}

TEST_F(CliTest, SwappedAddressesAreSaid) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  CliResult result = Cli({"stats", "--daemon", worker->address()});
  EXPECT_EQ(result.ended, "exit status 3");
  EXPECT_THAT(result.error, HasSubstr("is not a cache daemon"));
  result = Cli({"generate", "--text", "x", "--worker", daemon_address()});
  EXPECT_EQ(result.ended, "exit status 3");
  EXPECT_THAT(result.error, HasSubstr("is not an inference worker"));
}

// Its context holds the demo's documents in the tiny vocabulary.
worker::TinyLlamaSpec DemoModel() { return {.context = 32768}; }

TEST_F(CliTest, TheDemoShowsWhatTheCacheSaves) {
  UseTinyModel(DemoModel());
  const CliResult result = Cli({"demo", "--json", "--model", model_path(),
                                "--repeats", "2", "--max-tokens", "4"});
  EXPECT_EQ(result.ended, "exit status 0") << result.error;
  const Json demo = result.json();
  ASSERT_TRUE(demo.is_object()) << result.out;
  EXPECT_EQ(demo["exactness"], "EXACT");
  EXPECT_EQ(demo["answers_agree"], true);
  EXPECT_GT(demo["cached_tokens"], 2000);
  EXPECT_EQ(demo["created_tokens"], demo["cached_tokens"]);
  EXPECT_GT(demo["fresh_tokens"], 0);
  EXPECT_GT(demo["ttft_full_ms"], demo["ttft_cached_ms"]);
  ASSERT_EQ(demo["prompts"].size(), 2u);
  EXPECT_EQ(demo["prompts"][1]["exactness"], "MODULAR");
  EXPECT_EQ(demo["prompts"][1]["answers_agree"], true);
}

TEST_F(CliTest, WithoutADaemonTheWorkerSaysHowToStartOne) {
  UseTinyModel();
  auto worker = StartWorker();
  const CliResult put =
      Cli({"schema", "put", File("schema.xml", SmallSchema("lib")), "--worker",
           worker->address()});
  EXPECT_EQ(put.ended, "exit status 3");
  EXPECT_THAT(put.error, HasSubstr("start promptcache-daemon --socket="));
}

TEST_F(CliTest, AnInterruptedDemoLeavesNothing) {
  UseTinyModel(DemoModel());
  auto demo = StartCli({"demo", "--model", model_path(), "--repeats", "1000"});
  PC_ASSERT_OK(demo);
  // Both servers are up once their addresses are told.
  ASSERT_TRUE(Eventually(absl::Seconds(60), [&] {
    return demo->Log().find("worker  pid ") != std::string::npos;
  })) << demo->Log();
  std::vector<pid_t> pids;
  const std::string log = demo->Log();
  for (size_t at = 0; (at = log.find("  pid ", at)) != std::string::npos;) {
    at += 6;
    pids.push_back(std::stoi(log.substr(at)));
  }
  ASSERT_EQ(pids.size(), 2u);
  PC_ASSERT_OK(demo->Signal(SIGINT));
  EXPECT_THAT(demo->Wait(absl::Seconds(30)), IsOkAndHolds("exit status 130"));
  for (pid_t pid : pids) {
    EXPECT_EQ(::kill(pid, 0), -1) << "process " << pid << " still runs";
  }
}

// From then on the program has a thread that waits for it.
bool BlocksSigint(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:")) {
      return (std::stoull(line.substr(7), nullptr, 16) >> (SIGINT - 1) & 1) !=
             0;
    }
  }
  return false;
}

TEST_F(CliTest, AnInterruptedAnswerIsJsonToo) {
  UseTinyModel(DemoModel());
  auto worker = StartWorker();
  auto generate =
      StartCli({"generate", "--text", "x", "--max-tokens", "30000",
                "--ignore-eos", "--json", "--worker", worker->address()});
  PC_ASSERT_OK(generate);
  ASSERT_TRUE(Eventually(absl::Seconds(60),
                         [&] { return BlocksSigint(generate->pid()); }));
  PC_ASSERT_OK(generate->Signal(SIGINT));
  EXPECT_THAT(generate->Wait(absl::Seconds(30)),
              IsOkAndHolds("exit status 130"));
  const Json json = Json::parse(generate->Log(), nullptr, false);
  ASSERT_TRUE(json.is_object()) << generate->Log();
  EXPECT_EQ(json["error"]["code"], "CANCELLED");
  EXPECT_TRUE(json.contains("text"));
}

TEST_F(CliTest, AWorkerThatDiesInTheMiddleOfAnAnswerIsSaid) {
  UseTinyModel(DemoModel());
  auto worker = StartWorker();
  auto generate = StartCli({"generate", "--text", "x", "--max-tokens", "30000",
                            "--ignore-eos", "--worker", worker->address()});
  PC_ASSERT_OK(generate);
  // Some of it has come.
  ASSERT_TRUE(
      Eventually(absl::Seconds(60), [&] { return !generate->Log().empty(); }));
  PC_ASSERT_OK(worker->process().Signal(SIGKILL));
  EXPECT_THAT(generate->Wait(absl::Seconds(30)), IsOkAndHolds("exit status 3"));
  EXPECT_THAT(ReadFileOrDie(base_ + ".err"),
              HasSubstr(absl::StrCat("the worker at ", worker->address(),
                                     " went away in the middle of the "
                                     "answer")));
}

TEST_F(CliTest, UpServesUntilItIsInterrupted) {
  UseTinyModel();
  auto up = StartCli({"up", "--json", "--model", model_path(), "--dir",
                      dir() + "/state", "--worker", "127.0.0.1:0", "--daemon",
                      "127.0.0.1:0", "--memory", "64MiB"});
  PC_ASSERT_OK(up);
  ASSERT_TRUE(Eventually(absl::Seconds(60), [&] {
    return up->Log().find('\n') != std::string::npos || !up->Running();
  }));
  const Json told = Json::parse(up->Log(), nullptr, false);
  ASSERT_TRUE(told.is_object()) << up->Log();
  EXPECT_TRUE(std::filesystem::is_socket(told["socket"].get<std::string>()));
  const CliResult answer =
      Cli({"generate", "--text", "Hello", "--max-tokens", "3", "--ignore-eos",
           "--json", "--worker", told["worker"].get<std::string>()});
  EXPECT_EQ(answer.ended, "exit status 0") << answer.error;
  PC_ASSERT_OK(up->Signal(SIGTERM));
  EXPECT_THAT(up->Wait(absl::Seconds(30)), IsOkAndHolds("exit status 0"));
  EXPECT_EQ(::kill(told["worker_pid"].get<pid_t>(), 0), -1);
  EXPECT_EQ(::kill(told["daemon_pid"].get<pid_t>(), 0), -1);
}

TEST_F(CliTest, ASecondUpInOneFolderLeavesTheFirstAlone) {
  UseTinyModel();
  const std::vector<std::string> args{
      "up",       "--json",         "--model",  model_path(),
      "--dir",    dir() + "/state", "--worker", "127.0.0.1:0",
      "--daemon", "127.0.0.1:0",    "--memory", "64MiB"};
  auto first = StartCli(args);
  PC_ASSERT_OK(first);
  ASSERT_TRUE(Eventually(absl::Seconds(60), [&] {
    return first->Log().find('\n') != std::string::npos || !first->Running();
  }));
  const Json told = Json::parse(first->Log(), nullptr, false);
  ASSERT_TRUE(told.is_object()) << first->Log();
  const auto log_bytes = [&](const char* key) {
    return std::filesystem::file_size(told[key].get<std::string>());
  };
  const uintmax_t before = log_bytes("daemon_log");
  const CliResult second = Cli(args);
  EXPECT_EQ(second.ended, "exit status 1");
  EXPECT_THAT(second.error,
              HasSubstr(absl::StrCat("another promptcache (process ",
                                     first->pid(), ") runs in ")));
  EXPECT_EQ(log_bytes("daemon_log"), before);
  EXPECT_TRUE(std::filesystem::exists(dir() + "/state/daemon.port"));
  // One that is killed is told as that.
  ASSERT_EQ(::kill(told["worker_pid"].get<pid_t>(), SIGKILL), 0);
  EXPECT_THAT(first->Wait(absl::Seconds(30)), IsOkAndHolds("exit status 1"));
  EXPECT_THAT(first->Log(), HasSubstr("the worker was killed by signal 9"));
}

TEST_F(CliTest, AnUnknownFlagOfAServerIsToldInOneLine) {
  UseTinyModel();
  const CliResult result =
      Cli({"up", "--model", model_path(), "--dir", dir() + "/state", "--worker",
           "127.0.0.1:0", "--daemon", "127.0.0.1:0", "--memory", "64MiB",
           "--daemon-arg=--nosuch=1"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.error,
              StartsWith("promptcache: the daemon ended: Unknown command line "
                         "flag 'nosuch' (log "));
}

TEST_F(CliTest, AServerThatCannotStartSaysWhyAlone) {
  UseTinyModel();
  StartDaemon();
  CliResult result =
      Cli({"up", "--model", model_path(), "--dir", dir() + "/state", "--worker",
           "127.0.0.1:0", "--daemon", daemon_address(), "--memory", "64MiB"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(
      result.error,
      HasSubstr(absl::StrCat("the daemon ended: cannot listen on ",
                             daemon_address(), ": the port is taken (log ")));
  result = Cli({"up", "--model", File("no.gguf", "no model"), "--dir",
                dir() + "/state", "--worker", "127.0.0.1:0", "--daemon",
                "127.0.0.1:0", "--memory", "64MiB"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.error, HasSubstr("the worker ended: "));
  EXPECT_THAT(result.error, HasSubstr("no.gguf"));
}

TEST_F(CliTest, MoreMemoryThanThereIsIsRefusedAtOnce) {
  UseTinyModel();
  shell_ = "ulimit -v 4000000; ";  // nobody is harmed where it is not refused
  const std::vector<std::string> up{
      "up",       "--model",     model_path(), "--dir",      dir() + "/up",
      "--worker", "127.0.0.1:0", "--daemon",   "127.0.0.1:0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), up.begin(), up.end());
    return Cli(std::move(more));
  };
  CliResult result = with({"--memory", "900TiB"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.error,
              MatchesRegex(".*the daemon ended: --memory: 900 TiB asked, [0-9."
                           "]+ [KMGT]iB available .*\n"));
  result = with({"--memory", "64MiB", "--worker-arg=--tail_bytes=900TiB"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.error, HasSubstr("the worker ended: --tail_bytes: 900 TiB "
                                      "asked, "));
}

TEST_F(CliTest, ATakenPortIsToldBeforeAnythingThatTakesLong) {
  StartDaemon();
  const std::string listen = "--listen=" + daemon_address();
  const std::string told =
      "cannot listen on " + daemon_address() + ": the port is taken\n";
  // Neither the model nor the registry can be opened, which would be told, too.
  CliResult result = Server("promptcache-worker",
                            {listen, "--model=/no/model", "--device=cpu"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.out, EndsWith("\npromptcache-worker: " + told));
  EXPECT_THAT(result.out, Not(HasSubstr("chttp2")));
  result = Server("promptcache-daemon",
                  {listen, "--device=cpu", "--socket=" + dir() + "/other.sock",
                   "--db=/proc/none/registry.db"});
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.out, EndsWith("\npromptcache-daemon: " + told));
}

TEST_F(CliTest, MemoryThatHoldsNothingIsRefusedAndLittleIsSaid) {
  UseTinyModel();
  const auto up = [&](uint64_t memory, const std::string& daemon) {
    return Cli({"up", "--model", model_path(), "--dir", dir() + "/state",
                "--worker", "127.0.0.1:0", "--daemon", "127.0.0.1:0",
                "--memory", absl::StrCat(memory), daemon});
  };
  CliResult result = up(64, "--daemon-arg=--nosuch");
  EXPECT_EQ(result.ended, "exit status 2");
  EXPECT_THAT(result.error, HasSubstr("--memory: 64 holds nothing of this "
                                      "model: the smallest piece, 16 tokens"));
  // It would start, were the flag a flag.
  result =
      up(std::max<uint64_t>(2 * PageBytes(), 8192), "--daemon-arg=--nosuch");
  EXPECT_EQ(result.ended, "exit status 1");
  EXPECT_THAT(result.error, HasSubstr(" tokens of this model\n"));
}

TEST_F(CliTest, TheServersHelpAndVersionAreFine) {
  for (const std::string& name :
       {std::string("promptcache-daemon"), std::string("promptcache-worker")}) {
    const auto run = [&](const std::string& flag) {
      auto process = ChildProcess::Start(
          {.program = PROMPTCACHE_BIN + name,
           .args = {flag},
           .log_path = absl::StrCat(dir(), "/", name, flag)});
      PC_EXPECT_OK(process);
      EXPECT_THAT(process->Wait(absl::Seconds(60)),
                  IsOkAndHolds("exit status 0"));
      return process->Log();
    };
    const std::string help = run("--help");
    EXPECT_THAT(help, HasSubstr("--listen"));
    EXPECT_THAT(help, StartsWith(name + ": "));
    EXPECT_THAT(help, Not(HasSubstr(name + ": " + name)));
    EXPECT_EQ(run("--version"), name + " " PROMPTCACHE_VERSION "\n");
  }
}

}  // namespace
}  // namespace promptcache::e2e

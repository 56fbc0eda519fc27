// What each option takes and what it refuses, as golden/options.txt has it: of `train` and `eval` with what the
// configuration says then, of the other commands whether it is accepted. Where that is meant to change, see
// golden_text.h.
#include <gtest/gtest.h>

#include <cctype>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "runtime/base/exception.h"
#include "runtime/program/options.h"
#include "tests/runtime/golden_text.h"

namespace tierflow::testing {
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

struct Command {
  std::string name;
  std::function<std::string(const Words&)> parse;  // the configuration, or nothing
  // What it needs beside the option; in other runs of the command some options mean something that here they do not.
  std::vector<Words> besides;
};

std::vector<Command> commands() {
  const Words run = {"--model", "m", "--data", "d"};
  const Words train = joined(run, {"--out", "o"});
  std::vector<Words> trains;
  for (const Words& more : std::initializer_list<Words>{{},
                                                        {"--storage", "s"},
                                                        {"--eval-every", "5"},
                                                        {"--eval-every", "5", "--early-stopping-patience", "2"},
                                                        {"--storage", "s", "--export-every", "5"},
                                                        {"--sample-every", "5"},
                                                        {"--sample-prompts", "p"},
                                                        {"--loss", "simpo"},
                                                        {"--distill", "t"},
                                                        {"--method", "lora"},
                                                        {"--method", "galore"},
                                                        {"--method", "lora", "--lora-target-modules", "none"}})
    trains.push_back(joined(train, more));
  trains.push_back({"--model", "m", "--data", "d", "--storage", "s"});
  trains.push_back({"--data", "d", "--out", "o"});
  const auto accepted = [](auto parse) {
    return [parse](const Words& words) {
      parse(words);
      return std::string();
    };
  };
  std::vector<Command> all;
  all.push_back({"train", [](const Words& w) { return effective_configuration(parse_train(w)); }, trains});
  all.push_back({"eval",
                 [](const Words& w) { return effective_configuration(parse_eval(w)); },
                 {run, joined(run, {"--teacher-out", "t"})}});
  all.push_back({"plan", accepted(parse_plan), {{"--model", "m"}, {"--config", "c"}}});
  all.push_back({"generate",
                 accepted(parse_generate),
                 {{"--model", "m", "--prompt", "x"}, {"--model", "m", "--chat"}, {"--model", "m"}, {"--prompt", "x"}}});
  all.push_back({"init", accepted(parse_init), {{"--config", "c", "--out", "o"}, {"--config", "c"}, {"--out", "o"}}});
  all.push_back(
      {"export", accepted(parse_export), {{"--storage", "s", "--out", "o"}, {"--storage", "s"}, {"--out", "o"}}});
  all.push_back(
      {"merge", accepted(parse_merge), {{"--adapter", "a", "--out", "o"}, {"--adapter", "a"}, {"--out", "o"}}});
  for (const std::string name : {"status", "verify"})
    all.push_back({name, accepted([name](const Words& w) { return parse_store_command(name, w); }), {{"s"}, {}}});
  for (const std::string name : {"prepare", "preview"})
    all.push_back({"data " + name,
                   accepted([name](const Words& w) { return parse_data_command(name, w); }),
                   {joined(run, name == "prepare" ? Words{"--out", "o.tfd"} : Words{}), run, {"--data", "d"}}});
  return all;
}

// The options that the help names.
std::set<std::string> options_of(const std::string& command) {
  std::set<std::string> names;
  std::istringstream help(help_of(command, 100));
  for (std::string line; std::getline(help, line);) {
    const std::size_t at = line.find_first_not_of(' ');
    if (at == std::string::npos || !line.substr(at).starts_with("--")) continue;
    names.insert(line.substr(at, line.find_first_of(" =,", at) - at));
  }
  names.erase("--config-file");
  names.erase("--help");
  return names;
}

std::string difference(const Json& before, const Json& now) {
  std::string all;
  for (const auto& [name, value] : now.items())
    if (!before.contains(name) || before[name] != value) all += (all.empty() ? "" : ", ") + name + " " + value.dump();
  return all;
}

Json configuration(const std::string& text) {
  return text.empty() ? Json::object() : Json::parse(text);
}

std::string last(const Words& words, std::size_t from) {
  std::string text;
  for (std::size_t i = from; i < words.size(); ++i) text += (i == from ? "" : " ") + words[i];
  return text;
}

// The value replaced where it stands as a word.
std::string without(std::string text, const std::string& value) {
  const auto of_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '.'; };
  for (std::size_t at = 0; !value.empty() && (at = text.find(value, at)) != std::string::npos; ++at) {
    const std::size_t end = at + value.size();
    if ((at == 0 || !of_word(text[at - 1])) && (end == text.size() || !of_word(text[end])))
      text.replace(at, value.size(), "?");
  }
  return text;
}

// What comes of these words in the first run of the command in which they are accepted; what it is refused for before.
std::string outcome(const Command& command, const Words& words, std::map<std::string, Json>& plain) {
  std::string outcomes, before;
  const auto add = [&](const std::string& line) { outcomes += "\n    " + line; };
  for (const Words& beside : command.besides) {
    const std::string run = last(beside, 0);
    try {
      const Json now = configuration(command.parse(joined(beside, words)));
      if (!plain.contains(run)) {
        try {
          plain[run] = configuration(command.parse(beside));
        } catch (const Exception&) {
          plain[run] = Json::object();
        }
      }
      const bool first = &beside == &command.besides.front();
      const std::string changed = plain[run].empty() ? "" : difference(plain[run], now);
      add((first ? "" : "with " + run + ": ") + "accepted" + (changed.empty() ? "" : ": ") + changed);
      return outcomes;
    } catch (const Exception& error) {
      if (error.what() == before) continue;
      before = error.what();
      add("refused: " + before);
      if (before.starts_with(words[0] + " is ") && !before.starts_with(words[0] + " is for")) break;  // in any run
    }
  }
  return outcomes;
}

TEST(OptionsGolden, EachTakesAndRefusesAsBefore) {
  std::ostringstream out;
  for (const Command& command : commands()) {
    std::map<std::string, Json> plain;
    out << (out.view().empty() ? "" : "\n") << "tierflow " << command.name << '\n';
    out << configuration(command.parse(command.besides.front())).dump() << '\n';
    for (const std::string& option : options_of(command.name)) {
      if (command.name == "plan" && options_of("train").contains(option)) continue;
      std::map<std::string, std::string> values;  // by what comes of them
      std::vector<std::string> order;
      for (const std::string value :
           {"",           "-2e6", "-1",   "0",    "0.5", "1",   "3",        "1e6",     "5000",    "2000000",
            "3000000000", "auto", "none", "true", "x",   "x=2", "0.5,0.25", "every=3", "every=0", "128MiB"}) {
        const std::string what = outcome(command, value.empty() ? Words{option} : Words{option, value}, plain);
        const std::string kind = without(what, value);  // those of one kind stand once
        if (!values.contains(kind)) order.push_back(kind);
        values[kind] += " " + (value.empty() ? "alone" : value);
      }
      out << option << '\n';
      for (const std::string& kind : order) out << " " << values[kind] << kind << '\n';
    }
  }
  expect_golden(TIERFLOW_OPTION_GOLDEN "/options.txt", out.str());
}

}  // namespace
}  // namespace tierflow::testing

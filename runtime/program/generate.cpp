// `tierflow generate`: text from a model whose weights stream.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/seconds.h"
#include "runtime/base/signals.h"
#include "runtime/base/utf8.h"
#include "runtime/data/prompt_tokenizer.h"
#include "runtime/models/key_value_store.h"
#include "runtime/planning/profile.h"
#include "runtime/program/live_text.h"
#include "runtime/program/prompts.h"
#include "runtime/program/run_common.h"
#include "runtime/program/train.h"
#include "runtime/program/train_library.h"
#include "runtime/session/generator.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;
using Tokens = std::vector<std::int64_t>;

constexpr const char* kWritten = "what was generated until then is written";
constexpr std::int64_t kMostByItself = 128;  // sequences at once, where --batch is auto

Sampling sampling_of(const GenerateOptions& options, Sampling sampling) {
  // One that asks for draws wants them; a temperature of 0 asks for none.
  if (options.temperature || options.top_k || options.top_p || options.min_p) sampling.sample = true;
  sampling.temperature = options.temperature.value_or(sampling.temperature);
  sampling.top_k = options.top_k.value_or(sampling.top_k);
  sampling.top_p = options.top_p.value_or(sampling.top_p);
  sampling.min_p = options.min_p.value_or(sampling.min_p);
  sampling.repetition_penalty = options.repetition_penalty.value_or(sampling.repetition_penalty);
  if (sampling.temperature == 0) sampling.sample = false;
  return sampling;
}

const char* name_of(FinishReason reason) {
  return reason == FinishReason::stop ? "stop" : "length";
}

void check_output() {
  if (!std::cout) throw Exception(io::ErrorKind::io, "standard output cannot be written: no more is generated");
}

// Lines of standard input; a signal ends the wait for one.
class InputLines {
 public:
  // False at the end of the input.
  bool next(std::string& line) {
    for (;;) {
      if (const auto end = read_.find('\n'); end != std::string::npos) {
        line = read_.substr(0, end);
        read_.erase(0, end + 1);
        return true;
      }
      pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
      while (poll(&input, 1, -1) < 0 && errno == EINTR) throw_if_stopped();
      throw_if_stopped();
      std::array<char, 4096> piece{};
      const ssize_t got = read(STDIN_FILENO, piece.data(), piece.size());
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        line = std::exchange(read_, "");
        return !line.empty();
      }
      read_.append(piece.data(), static_cast<std::size_t>(got));
    }
  }

 private:
  std::string read_;
};

// On standard output.
LiveText live_text(PromptTokenizer& tokenizer) {
  return {[&tokenizer](const Tokens& tokens) { return tokenizer.decode(tokens); },
          [](std::string_view piece) {
            std::cout << piece << std::flush;
            check_output();
          }};
}

class Generation {
 public:
  Generation(const GenerateOptions& options, TrainingLog& log)
      : options_(options),
        log_(log),
        model_(with_experts_on_demand(
            load_with(options.model, options.adapter, options.base_precision, options.read_as))) {
    say_what_differs(options.adapter, options, log);
    const DataOptions data = data_options(options, model_.spec());
    say_if_bytes_are_tokens(data, log);
    tokenizer_.emplace(data);
    const GenerationConfig config = read_generation_config(options.model);
    generation_ = {.sampling = sampling_of(options, config.sampling),
                   .stop_tokens = config.stop_tokens,
                   .max_new_tokens = options.max_new_tokens,
                   .seed = options.seed};
    if (!config.not_applied.empty())
      log.say(fmt::format("warning: {} of generation_config.json {} not applied", fmt::join(config.not_applied, ", "),
                          config.not_applied.size() == 1 ? "is" : "are"));
    for (const std::int64_t id : tokenizer_->ids_of(options.stop)) generation_.stop_tokens.push_back(id);
  }

  void answer(const OrderedJson& prompts) {
    const std::vector<Tokens> ids = tokenizer_->encode(prompts);
    begin(
        [&](std::int64_t batch) {
          return GenerationShape::of(model_.spec(), ids, generation_, batch, options_.sequence_length);
        },
        options_.batch);
    const bool live = prompts.size() == 1 && !options_.json;
    LiveText text = live_text(*tokenizer_);
    std::vector<Tokens> unfinished(ids.size());
    const auto started = std::chrono::steady_clock::now();
    const std::uint64_t most = ids.size() * static_cast<std::uint64_t>(options_.max_new_tokens);
    const auto shown = [&] {
      if (!live) log_.progress("generating", tokens_, most);
    };
    try {
      generate(*session_, ids, generation_,
               {.before_pass =
                    [&] {
                      throw_if_stopped(kWritten);
                      shown();
                      ++passes_;
                    },
                .on_token =
                    [&](std::size_t prompt, std::int64_t token) {
                      unfinished[prompt].push_back(token);
                      ++tokens_;
                      if (live) text.add(token);
                    },
                .on_end =
                    [&](std::size_t prompt, const Generated& generated) {
                      unfinished[prompt].clear();
                      if (live)
                        end_line(text);
                      else
                        print(prompt, generated.tokens, name_of(generated.reason));
                    }});
    } catch (const Exception&) {
      print_what_there_is([&] {
        if (live && tokens_ > 0) end_line(text);
        for (std::size_t prompt = 0; prompt < unfinished.size() && !live; ++prompt)
          if (!unfinished[prompt].empty()) print(prompt, unfinished[prompt], "interrupted");
      });
      throw;
    }
    report(ids.size(), seconds_since(started));
  }

  // A line of standard input, then the answer, until the input ends. On a terminal an empty line ends it too; elsewhere
  // it says nothing.
  void talk() {
    const std::int64_t most = model_.spec().config.max_positions;
    const std::int64_t context = most > 0 ? std::min(options_.context, most) : options_.context;
    if (context <= options_.max_new_tokens)
      fail(io::ErrorKind::usage, "",
           fmt::format("--max-new-tokens {} leaves no room for a message in a talk of {} tokens (--context)",
                       options_.max_new_tokens, context));
    const std::int64_t longest = context - options_.max_new_tokens;
    begin([&](std::int64_t) { return GenerationShape::of_talk(model_.spec(), context, options_.sequence_length); }, 1);
    Talk talk(*session_, context);
    auto messages = OrderedJson::array();
    if (!options_.system.empty()) messages.push_back({{"role", "system"}, {"content", options_.system}});
    const bool terminal = isatty(STDIN_FILENO) == 1;
    if (terminal) std::cerr << "a line is a message; an empty line or Ctrl-D ends the talk\n";
    InputLines lines;
    const auto next_line = [&](std::string& line) {
      throw_if_stopped();
      if (terminal) std::cerr << "> ";
      return lines.next(line) && !(terminal && line.empty());
    };
    for (std::string line; next_line(line);) {
      if (line.empty()) continue;
      if (find_invalid_utf8(line) != std::string::npos) fail_input("standard input", "is not UTF-8");
      messages.push_back({{"role", "user"}, {"content", line}});
      const std::vector<Tokens> ids = tokenizer_->encode(OrderedJson::array({{{"messages", messages}}}));
      if (std::ssize(ids[0]) > longest)
        fail(io::ErrorKind::usage, "",
             fmt::format("the talk has {} tokens and an answer may have {}: that is beyond {} (--context)",
                         ids[0].size(), options_.max_new_tokens, context));
      LiveText text = live_text(*tokenizer_);
      std::string answer;
      bool begun = false;
      try {
        talk.answer(ids[0], generation_,
                    {.before_pass = [] { throw_if_stopped(kWritten); },
                     .on_token =
                         [&](std::size_t, std::int64_t token) {
                           begun = true;
                           text.add(token);
                         },
                     .on_end =
                         [&](std::size_t, const Generated&) {
                           begun = false;
                           answer = end_line(text);
                         }});
      } catch (const Exception&) {
        print_what_there_is([&] {
          if (begun) end_line(text);
        });
        throw;
      }
      messages.push_back({{"role", "assistant"}, {"content", answer}});
      log_.object({{"talk", {{"tokens", ids[0].size()}, {"taken_over", talk.taken_over()}}}});
    }
  }

 private:
  // most: longest sequences at once.
  void begin(const std::function<GenerationShape(std::int64_t batch)>& shape_of, std::int64_t most) {
    const std::uint64_t device_fixed = prepare_torch(device_of(options_), options_.threads);
    settings_ = session_settings(options_, device_fixed, log_.teller());
    SessionOptions& settings = settings_;
    GenerationShape shape = shape_of(most > 0 ? most : kMostByItself);
    // By itself it takes at most half of the host's memory and a quarter of the device's for them.
    while (most == 0 && shape.batch > 1 &&
           (shape.cache.bytes() > settings.host_memory / 2 || shape.workspace > settings.device_memory / 4))
      shape = shape_of(shape.batch / 2);
    settings.fewer_micro_batches = most == 0;
    settings.train = false;
    settings.micro_batch = 1;
    settings.micro_batches = static_cast<int>(shape.batch);
    settings.sequence_length = shape.tokens;
    settings.cache = shape.cache;
    announce_device(options_, settings, log_);
    settings.workspace = shape.workspace;
    try {
      session_.emplace(model_, settings, AdamW{}, log_.stoppable_progress());
    } catch (const Exception& error) {
      if (error.error().kind != io::ErrorKind::usage) throw;
      fail_with_more(error.error(),
                     fmt::format("computing with keys and values takes {} of --device-memory: a smaller --batch, fewer "
                                 "--max-new-tokens or a "
                                 "smaller --sequence-length need less{}",
                                 human_bytes(shape.workspace),
                                 settings.storage.empty() ? ", and with --storage not all are in RAM" : ""));
    }
    log_.say(session_->describe());
    log_.begin();
    lanes_ = session_->lanes();
    experts_ = session_->expert_use();
  }

  static std::string end_line(LiveText& text) {
    std::string whole = text.end();
    std::cout << std::endl;
    check_output();
    return whole;
  }

  // When something failed: where output can be written, what came until then is. The failure is what is told of.
  void print_what_there_is(const std::function<void()>& print_it) {
    if (!std::cout) return;
    tokenizer_->ignore_stops();
    try {
      print_it();
    } catch (const Exception&) {
    }
  }

  void print(std::size_t prompt, const Tokens& tokens, const char* reason) {
    const std::string text = tokenizer_->decode(tokens);
    if (options_.json) {
      const OrderedJson line{{"prompt", prompt + 1}, {"text", text}, {"tokens", tokens}, {"finish_reason", reason}};
      std::cout << line.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) << std::endl;
    } else {
      std::cout << fmt::format("== {} ({})\n", prompt + 1, reason) << text << std::endl;
    }
    check_output();
  }

  // Tokens a second, were nothing slower than drives and link with the rates that `tierflow plan` measured.
  std::optional<double> streaming_limit(std::uint64_t read, std::uint64_t uploaded) {
    const Say say = [this](const std::string& text) { log_.say(text); };
    const auto machine = ProfileCache(model_.spec(), settings_, train_build(), say).machine();
    if (!machine) return std::nullopt;
    const auto seconds = [](std::uint64_t bytes, double rate) {
      return rate > 0 ? static_cast<double>(bytes) / rate : 0.0;
    };
    const double least = std::max(seconds(read, machine->rates.disk_read), seconds(uploaded, machine->rates.upload));
    return least > 0 ? std::optional(static_cast<double>(tokens_) / least) : std::nullopt;
  }

  // How fast, and how near to what streaming allows.
  void report(std::size_t prompts, double seconds) {
    const auto lanes = session_->lanes();
    int slowest = 0;
    std::array<double, swap::kLanes> busy{};
    for (int lane = 0; lane < swap::kLanes; ++lane) {
      busy[lane] = lanes[lane].busy_seconds - lanes_[lane].busy_seconds;
      if (busy[lane] > busy[slowest]) slowest = lane;
    }
    const char* name = swap::lane_name(static_cast<swap::Lane>(slowest));
    const double rate = static_cast<double>(tokens_) / seconds, share = busy[slowest] / seconds;
    const auto moved = [&](swap::Lane lane) {
      const auto index = static_cast<std::size_t>(lane);
      return lanes[index].bytes - lanes_[index].bytes;
    };
    const std::uint64_t read = moved(swap::Lane::disk_read), uploaded = moved(swap::Lane::upload);
    const CacheTraffic traffic = session_->key_values() != nullptr ? session_->key_values()->traffic() : CacheTraffic();
    const std::optional<double> limit = streaming_limit(read + traffic.read, uploaded);
    nlohmann::json generation{{"prompts", prompts},
                              {"tokens", tokens_},
                              {"seconds", seconds},
                              {"tokens_per_s", rate},
                              {"slowest_lane", name},
                              {"slowest_lane_busy", share},
                              {"limit_tokens_per_s", limit ? nlohmann::json(*limit) : nlohmann::json()},
                              {"passes", passes_},
                              {"bytes_read", read},
                              {"bytes_uploaded", uploaded}};
    const CachePlacement& cache = session_->plan().cache;
    generation["keys_and_values"] = {{"host_bytes", cache.host},
                                     {"storage_bytes", cache.storage},
                                     {"bytes_read", traffic.read},
                                     {"bytes_written", traffic.written},
                                     {"waited_s", traffic.waited}};
    std::string line = fmt::format("{} token{} in {:.1f} s, {:.2f} a second; {} was busy {:.0f}% of it", tokens_,
                                   tokens_ == 1 ? "" : "s", seconds, rate, name, 100 * share);
    line += limit ? fmt::format("; reading and uploading alone allow {:.2f}", *limit)
                  : "; what reading and uploading alone allow is unknown until `tierflow plan` measures this machine";
    if (cache.storage != 0)
      line += fmt::format("; of keys and values {} were read and {} written, which took {:.0f}% of it",
                          human_bytes(traffic.read), human_bytes(traffic.written), 100 * traffic.waited / seconds);
    if (const ExpertUse now = session_->expert_use(); now.all > experts_.all) {
      const ExpertUse use{.all = now.all - experts_.all,
                          .chosen = now.chosen - experts_.chosen,
                          .needed = now.needed - experts_.needed,
                          .fetched = now.fetched - experts_.fetched,
                          .read = now.read - experts_.read};
      const auto percent = [](std::uint64_t part, std::uint64_t of) {
        return 100 * static_cast<double>(part) / static_cast<double>(of);
      };
      generation["experts"] = {{"all", use.all},
                               {"chosen", use.chosen},
                               {"needed", use.needed},
                               {"fetched", use.fetched},
                               {"read", use.read}};
      line += fmt::format("; a pass took {:.0f}% of the experts: {:.0f}% of these were on the device, {:.0f}% in RAM, ",
                          percent(use.needed, use.all), percent(use.needed - use.fetched, use.needed),
                          percent(use.fetched - use.read, use.needed)) +
              fmt::format("{:.0f}% were read", percent(use.read, use.needed));
    }
    log_.object({{"generation", generation}});
    log_.say(line);
  }

  const GenerateOptions& options_;
  TrainingLog& log_;
  Model model_;
  std::optional<PromptTokenizer> tokenizer_;
  GenerationOptions generation_;
  SessionOptions settings_;
  std::optional<Session> session_;
  std::array<swap::LaneCounters, swap::kLanes> lanes_{};
  ExpertUse experts_;
  std::uint64_t passes_ = 0;
  std::uint64_t tokens_ = 0;
};

}  // namespace

int run_generate(const GenerateOptions& options) {
  watch_signals();
  TrainingLog log(options.log_json, false);
  const bool talks = options.prompt.empty() && options.prompts.empty();
  const PromptForm form{.chat = options.chat, .system = options.system};
  OrderedJson prompts = options.prompts.empty() ? OrderedJson::array() : read_prompts(options.prompts, form);
  for (const std::string& text : options.prompt) {
    if (find_invalid_utf8(text) != std::string::npos) fail(io::ErrorKind::usage, "", "--prompt is not UTF-8");
    prompts.push_back(as_prompt(form, text));
  }
  Generation generation(options, log);
  if (talks)
    generation.talk();
  else
    generation.answer(prompts);
  return 0;
}

}  // namespace tierflow

// Generation through a session: logits of cached tokens, the same bits under every budget, and which token is drawn.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <regex>

#include "runtime/device/device_memory.h"
#include "runtime/models/key_value_store.h"
#include "runtime/session/generator.h"
#include "runtime/session/sampler.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/cached_rows.h"

namespace tierflow::testing {
namespace {

std::string with_layers(std::string json, int layers) {
  return std::regex_replace(json, std::regex("\"num_hidden_layers\": ?[0-9]+"),
                            "\"num_hidden_layers\":" + std::to_string(layers));
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(Generation, a_token_behind_cached_ones_has_the_logits_that_it_has_in_the_whole_row) {
  DeviceMemory::install();
  for (const Case& which : cases()) {
    for (const Tiling& tiling : {Tiling{}, kTiled}) {
      SCOPED_TRACE(which.name);
      Session session(plain_model(which, tiling), for_generation(resident(2)));
      const Tokens one = some_tokens(14, 5), other = some_tokens(11, 40);
      KeyValueCache whole(session.model().spec(), {14, 11});
      const auto expected = session.next_logits(
          {row(whole, one, {{.sequence = 0, .length = 14}}), row(whole, other, {{.sequence = 1, .length = 11}})});
      // In pieces: 5 tokens, then 8 of one beside 9 of the other in one row, then the last one of one.
      KeyValueCache cache(session.model().spec(), {14, 11});
      session.next_logits({row(cache, {one.begin(), one.begin() + 5}, {{.sequence = 0, .length = 5}}),
                           row(cache, {other.begin(), other.begin() + 2}, {{.sequence = 1, .length = 2}})});
      Tokens both(one.begin() + 5, one.begin() + 12);
      both.insert(both.end(), other.begin() + 2, other.end());
      const auto second = session.next_logits(
          {row(cache, both,
               {{.sequence = 0, .length = 7, .before = 5}, {.sequence = 1, .begin = 7, .length = 9, .before = 2}})});
      session.next_logits({row(cache, {one[12]}, {{.sequence = 0, .length = 1, .before = 12}})});
      const auto third = session.next_logits({row(cache, {one[13]}, {{.sequence = 0, .length = 1, .before = 13}})});
      ASSERT_EQ(second.at(0).sizes(), (std::vector<std::int64_t>{2, 96}));
      EXPECT_LT(distance(second[0][1], expected[1][0]), 0.03);
      EXPECT_LT(distance(third.at(0)[0], expected[0][0]), 0.03);
      EXPECT_GT(distance(expected[1][0], expected[0][0]), 0.1);
    }
  }
}

std::vector<Tokens> generated(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options) {
  std::vector<Tokens> all(prompts.size()), came(prompts.size());
  generate(session, prompts, options,
           {.on_token = [&](std::size_t prompt, std::int64_t token) { came[prompt].push_back(token); },
            .on_end = [&](std::size_t prompt, const Generated& result) { all[prompt] = result.tokens; }});
  EXPECT_EQ(came, all);
  return all;
}

TEST(Generation, has_the_same_tokens_under_every_budget) {
  DeviceMemory::install();
  const Folder folder;
  const GenerationOptions options{.sampling = {.sample = true, .top_k = 0}, .max_new_tokens = 6, .seed = 9};
  const std::vector<Tokens> prompts = {some_tokens(16, 1), some_tokens(3, 2), some_tokens(9, 3)};
  for (const Case& which : cases()) {
    SCOPED_TRACE(which.name);
    Session session(plain_model(which), for_generation(resident(3)));
    const auto expected = generated(session, prompts, options);
    Session small(plain_model(which), for_generation(streamed(resident(3), folder)));
    EXPECT_EQ(generated(small, prompts, options), expected);
    EXPECT_EQ(expected[1].size(), 6U);
    EXPECT_NE(expected[0], expected[1]);
  }
}

// In RAM; on storage, with as few buffers as work; some layers' here and some there.
TEST(Generation, has_the_same_tokens_wherever_keys_and_values_lie) {
  DeviceMemory::install();
  const Folder folder;
  const GenerationOptions options{.sampling = {.sample = true, .top_k = 0}, .max_new_tokens = 9, .seed = 9};
  std::vector<Tokens> prompts;
  for (std::int64_t i = 0; i < 7; ++i) prompts.push_back(some_tokens(20 + 5 * i, i));  // all are computed in pieces
  int stored = 0, split = 0;
  for (Case which : cases()) {
    if (which.name == cases().front().name) which.json = with_layers(which.json, 8);
    SCOPED_TRACE(which.name);
    const Model model = plain_model(which);
    Session session(model, for_generation(resident(6)));
    const auto expected = generated(session, prompts, options);
    const GenerationShape shape = GenerationShape::of(model.spec(), prompts, options, 6, 16);
    const std::uint64_t least = smallest_placement(shape.cache).host, all = shape.cache.bytes();
    // From the smallest budget that works on, to the first one with which some layers' are in RAM.
    for (std::uint64_t host = least, tried = 0; host < least + all; host += 12 * 1024) {
      SessionOptions small = for_generation(streamed(resident(6), folder));
      small.cache = shape.cache;
      small.host_memory = host;
      const std::unique_ptr<Session> streams = opened(model, small);
      if (streams == nullptr) continue;
      const CachePlacement& cache = streams->plan().cache;
      EXPECT_LE(streams->plan().host_bytes(), host);
      EXPECT_EQ(streams->key_values() != nullptr, cache.storage != 0);
      if (cache.storage == 0) break;
      const bool both = cache.stored_layers() < cached_layers(shape.cache);
      if (tried++ > 0 && !both) continue;
      ++stored;
      split += both ? 1 : 0;
      EXPECT_EQ(generated(*streams, prompts, options), expected);
      const CacheTraffic traffic = streams->key_values()->traffic();
      EXPECT_GT(traffic.read, 0U);
      EXPECT_GT(traffic.written, 0U);
      EXPECT_EQ(generated(*streams, prompts, options), expected);  // once more, in the same places
      if (both || cached_layers(shape.cache) < 3) break;
    }
  }
  EXPECT_GT(stored, 3);
  EXPECT_GT(split, 0);
}

// Between the steps of a training whose keys and values have no room in RAM.
TEST(Generation, of_a_session_that_trains_has_the_same_tokens_and_changes_no_step) {
  DeviceMemory::install();
  const Folder folder;
  Case which = cases().front();
  which.json = with_layers(which.json, 8);
  const Model model = plain_model(which);
  std::vector<Tokens> prompts;
  for (std::int64_t i = 0; i < 6; ++i) prompts.push_back(some_tokens(40, i));
  const GenerationOptions options{.max_new_tokens = 6};
  const auto trained = [&](Session& session, bool samples) {
    std::vector<Tokens> found;
    std::vector<double> losses;
    for (int step = 0; step < 2; ++step) {
      losses.push_back(session.step(batches(6, step)).loss);
      if (samples) std::ranges::copy(generated(session, prompts, options), std::back_inserter(found));
    }
    return std::pair(found, losses);
  };
  Session plain(model, resident(6)), in_ram(model, resident(6));
  const auto expected = trained(in_ram, true);
  EXPECT_EQ(expected.second, trained(plain, false).second);
  SessionOptions small = streamed(resident(6), folder);
  small.cache = GenerationShape::of(model.spec(), prompts, options, 6, small.sequence_length).cache;
  std::unique_ptr<Session> session;
  for (small.host_memory = smallest_placement(small.cache).host; session == nullptr; small.host_memory += 16 * 1024)
    session = opened(model, small);
  ASSERT_NE(session->key_values(), nullptr);
  EXPECT_LE(session->plan().host_bytes(), session->options().host_memory);
  EXPECT_EQ(trained(*session, true), expected);
  const std::uint64_t written = session->key_values()->traffic().written, all = session->bytes_written();
  EXPECT_GT(written, 0U);
  std::uint64_t of_state = 0;
  for (const io::DriveStats& drive : session->drives()) of_state += drive.bytes_written;
  EXPECT_EQ(all, of_state + written);
}

TEST(Generation, says_in_one_line_that_keys_and_values_fit_nowhere) {
  DeviceMemory::install();
  const Folder folder;
  const std::vector<Tokens> prompts(3, some_tokens(16, 1));
  const Model model = plain_model(cases().front());
  SessionOptions small = for_generation(streamed(resident(3), folder));
  small.cache = GenerationShape::of(model.spec(), prompts, {.max_new_tokens = 40}, 3, 16).cache;
  small.host_memory = smallest_placement(small.cache).host;
  expect_refusal(io::ErrorKind::usage, {"keys and values of 3 sequences take"}, [&] { Session(model, small); });
  small.storage.clear();
  small.host_memory = small.cache.bytes();
  expect_refusal(io::ErrorKind::usage, {"keys and values of 3 sequences take"}, [&] { Session(model, small); });
}

// Prompts of unequal length, texts of unequal length: where one ends, the next begins beside the others.
TEST(Generation, a_place_that_becomes_free_is_taken_at_once) {
  DeviceMemory::install();
  const Case which = cases().front();
  const std::vector<Tokens> prompts = {some_tokens(3, 1), some_tokens(14, 2), some_tokens(5, 3),
                                       some_tokens(2, 4), some_tokens(9, 5),  some_tokens(4, 6)};
  GenerationOptions options{.sampling = {.sample = true, .top_k = 0}, .max_new_tokens = 24, .seed = 9};
  std::vector<Tokens> alone;
  Session one(plain_model(which), for_generation(resident(1)));
  for (const Tokens& tokens : generated(one, prompts, options)) alone.push_back(tokens);
  // Tokens of which some texts have one early.
  options.stop_tokens = {alone[0][4], alone[2][2]};
  std::size_t together[2] = {0, 0}, in_pairs = 0;  // passes after which each place is free; were it two by two
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const auto end = std::ranges::find_first_of(alone[i], options.stop_tokens);
    const std::size_t draws = static_cast<std::size_t>(end - alone[i].begin()) + (end == alone[i].end() ? 0 : 1);
    alone[i].erase(end, alone[i].end());
    *std::ranges::min_element(together) += draws;
    in_pairs += i % 2 == 0 ? draws : draws - std::min(draws, alone[i - 1].size() + 1);
  }
  Session session(plain_model(which), for_generation(resident(2)));
  std::size_t passes = 0;
  std::vector<Tokens> found(prompts.size());
  generate(session, prompts, options,
           {.before_pass = [&] { ++passes; },
            .on_end = [&](std::size_t prompt, const Generated& result) { found[prompt] = result.tokens; }});
  EXPECT_EQ(found, alone);
  EXPECT_EQ(passes, *std::ranges::max_element(together));
  EXPECT_LT(passes, in_pairs);
}

// Windows of 8 tokens in rings: what a ring forgot is not seen, and what it has is where it is looked for.
TEST(Generation, a_window_keeps_its_last_tokens) {
  DeviceMemory::install();
  int windows = 0;
  for (const Case& which : cases()) {
    Session session(plain_model(which), for_generation(resident(1)));
    const ModelSpec& spec = session.model().spec();
    const bool has_window =
        CacheShape::of(spec, {16}, 1).bytes() < CacheShape::of(spec, {16}, KeyValueCache::kAnySpan).bytes();
    if (!has_window) continue;
    SCOPED_TRACE(which.name);
    ++windows;
    const Tokens tokens = some_tokens(16, 5);
    KeyValueCache whole(spec, {16});
    const at::Tensor expected = session.next_logits({row(whole, tokens, {{.length = 16}})}).at(0);
    for (const std::int64_t piece : {1, 3, 4}) {
      KeyValueCache cache(spec, {16}, piece), large(spec, {16});
      at::Tensor last, same;
      for (std::int64_t at = 0; at < 16;) {
        const std::int64_t count = std::min(at == 0 ? 6 : piece, 16 - at);
        const Tokens part(tokens.begin() + at, tokens.begin() + at + count);
        last = session.next_logits({row(cache, part, {{.length = count, .before = at}})}).at(0);
        same = session.next_logits({row(large, part, {{.length = count, .before = at}})}).at(0);
        at += count;
      }
      EXPECT_TRUE(torch::equal(last, same)) << piece;
      EXPECT_LT(distance(last[0], expected[0]), 0.03) << piece;
    }
  }
  EXPECT_GT(windows, 0);
}

TEST(Generation, refuses_what_does_not_fit) {
  DeviceMemory::install();
  const Case which = cases().front();
  Session session(plain_model(which), for_generation(resident(1)));
  const auto run = [&](const Tokens& prompt, std::int64_t new_tokens) {
    generated(session, {prompt}, {.max_new_tokens = new_tokens});
  };
  expect_refusal(io::ErrorKind::usage, {"prompt 1 has no token"}, [&] { run({}, 1); });
  expect_refusal(io::ErrorKind::usage, {"has token 96"}, [&] { run({96}, 1); });
  expect_refusal(io::ErrorKind::usage, {"positions"}, [&] { run({1}, 1 << 20); });
  KeyValueCache cache(session.model().spec(), {4, 4});
  expect_refusal(io::ErrorKind::usage, {"at most 1 rows"}, [&] {
    session.next_logits({row(cache, {1}, {{.length = 1}}), row(cache, {1}, {{.sequence = 1, .length = 1}})});
  });
  Session another(plain_model(which), for_generation(resident(1)));
  expect_refusal(io::ErrorKind::internal, {"does not fit a cache of 4"}, [&] {
    another.next_logits({row(cache, {1, 2, 3, 4, 5}, {{.length = 5}})});
  });
}

const std::vector<float> kLogits = {0.5F, 2.0F, -1.0F, 2.0F, 1.0F};

std::vector<double> shares(const Sampling& sampling, const Tokens& before = {}) {
  constexpr int kDraws = 40000;
  std::vector<double> share(kLogits.size());
  for (int draw = 0; draw < kDraws; ++draw)
    share[static_cast<std::size_t>(next_token(kLogits, before, sampling, 1, static_cast<std::uint64_t>(draw)))] +=
        1.0 / kDraws;
  return share;
}

void expect_shares(const Sampling& sampling, const std::vector<double>& logits, const Tokens& before = {}) {
  double total = 0;
  for (const double logit : logits) total += std::exp(logit);
  const std::vector<double> found = shares(sampling, before);
  for (std::size_t token = 0; token < logits.size(); ++token)
    EXPECT_NEAR(found[token], std::exp(logits[token]) / total, 0.01) << token;
}

TEST(Sampling, draws_tokens_as_often_as_their_probability_says) {
  const double none = -INFINITY;
  expect_shares({.sample = true, .top_k = 0}, {0.5, 2, -1, 2, 1});
  expect_shares({.sample = true, .temperature = 0.5, .top_k = 0}, {1, 4, -2, 4, 2});
  expect_shares({.sample = true, .top_k = 3}, {none, 2, none, 2, 1});
  expect_shares({.sample = true, .top_k = 1}, {none, 2, none, 2, none});  // two are as likely
  expect_shares({.sample = true, .top_k = 0, .top_p = 0.3}, {none, 2, none, none, none});
  expect_shares({.sample = true, .top_k = 0, .top_p = 0.6}, {none, 2, none, 2, none});
  expect_shares({.sample = true, .temperature = 1e-300, .top_k = 0}, {none, 2, none, 2, none});
  expect_shares({.sample = true, .top_k = 0, .min_p = 0.3}, {none, 2, none, 2, 1});
  expect_shares({.sample = true, .top_k = 0, .repetition_penalty = 2}, {0.5, 1, -2, 2, 1}, {1, 2, 1});
}

TEST(Sampling, without_draws_takes_the_most_likely_token_and_the_lowest_id_among_equals) {
  EXPECT_EQ(next_token(kLogits, {}, {}, 0, 0), 1);
  EXPECT_EQ(next_token(kLogits, Tokens{1}, {.repetition_penalty = 1.5}, 0, 0), 3);
}

TEST(Sampling, leaves_out_what_may_not_come) {
  EXPECT_EQ(next_token(kLogits, {}, {.suppress_tokens = {1}}, 0, 0), 3);
  EXPECT_EQ(next_token(kLogits, {}, {}, 0, 0, Tokens{1, 3}), 4);
  EXPECT_EQ(next_token(kLogits, Tokens{4, 1, 0, 4}, {.no_repeat_ngram_size = 2}, 0, 0), 3);
  EXPECT_EQ(next_token(kLogits, Tokens{4, 1, 0, 4}, {.no_repeat_ngram_size = 3}, 0, 0), 1);
  EXPECT_EQ(next_token(kLogits, Tokens{4, 1, 3}, {.no_repeat_ngram_size = 1}, 0, 0), 0);
  EXPECT_EQ(next_token(kLogits, Tokens{1}, {.no_repeat_ngram_size = 9}, 0, 0), 1);
  expect_shares({.sample = true, .top_k = 0, .suppress_tokens = {3, 4}}, {0.5, 2, -1, -INFINITY, -INFINITY});
  expect_refusal(io::ErrorKind::usage, {"forbids all"}, [&] {
    next_token(kLogits, {}, {.suppress_tokens = {0, 1, 2, 3, 4}}, 0, 0);
  });
}

// Of many tokens, of which the first few are sorted at a time.
TEST(Sampling, draws_far_down_a_large_vocabulary) {
  const std::vector<float> flat(5000, 1.0F);
  std::vector<int> drawn(10);
  for (std::uint64_t draw = 0; draw < 4000; ++draw)
    ++drawn[static_cast<std::size_t>(next_token(flat, {}, {.sample = true, .top_k = 0}, 1, draw) / 500)];
  for (const int each : drawn) EXPECT_NEAR(each, 400, 80);
}

TEST(Sampling, says_when_logits_are_no_numbers) {
  for (const float bad : {NAN, INFINITY})
    expect_refusal(io::ErrorKind::numeric, {"not finite"}, [&] {
      next_token(std::vector<float>{1, bad}, {}, {}, 0, 0);
    });
}

}  // namespace
}  // namespace tierflow::testing

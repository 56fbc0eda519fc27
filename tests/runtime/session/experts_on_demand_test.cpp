// Mixtures whose experts are fetched when a router chose them: the bits of the same model with all of them, under every
// budget, and no more fetched than the routers chose.
#include <gtest/gtest.h>

#include <regex>

#include "runtime/device/device_memory.h"
#include "runtime/session/generator.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/cached_rows.h"

namespace tierflow::testing {
namespace {

Case mixtral(int experts, int per_token) {
  return {.name = "mixtral " + std::to_string(per_token) + " of " + std::to_string(experts),
          .json = llama_json("MixtralForCausalLM",
                             R"(, "num_local_experts": )" + std::to_string(experts) + R"(, "num_experts_per_tok": )" +
                                 std::to_string(per_token),
                             24)};
}

std::vector<Case> mixtures() {
  std::vector<Case> found;
  for (const Case& which : cases())
    if (parse_model_spec(which.json, which.name).config.experts.count > 0) found.push_back(which);
  found.push_back(mixtral(16, 2));
  found.push_back(mixtral(3, 3));  // every token takes all
  return found;
}

Model model_of(const Case& which, const Tiling& tiling, WeightFormat format) {
  const Model model = plain_model(which, tiling);
  return format == WeightFormat::bf16 ? model : with_base_format(model, format);
}

// With as little memory of a kind as works.
SessionOptions least(const Model& model, SessionOptions options, std::uint64_t SessionOptions::*memory) {
  options.*memory = 1;
  try {
    const Session refused(model, options);
  } catch (const Exception& error) {
    const std::string said = "the smallest that works is ", text = error.what();
    const std::string found = text.substr(text.find(said) + said.size());
    std::size_t unit = 0;
    options.*memory = std::stoull(found, &unit) << (found.compare(unit, 3, "MiB") == 0 ? 20 : 10);
  }
  return options;
}
SessionOptions least_device(const Model& model, const SessionOptions& options) {
  return least(model, options, &SessionOptions::device_memory);
}
// From storage, with no room in RAM beside what streams through.
SessionOptions stored(const Model& model, SessionOptions options, const Folder& folder) {
  return least(model, streamed(std::move(options), folder), &SessionOptions::host_memory);
}

// Logits of two prompts, each in a row of its own, and of tokens behind them: one alone, then of both sequences.
std::vector<at::Tensor> logits_of(Session& session) {
  KeyValueCache cache(session.model().spec(), {20, 20});
  std::vector<at::Tensor> all;
  const auto pass = [&](const std::vector<CachedRow>& rows) {
    for (const at::Tensor& logits : session.next_logits(rows)) all.push_back(logits);
  };
  pass({row(cache, some_tokens(16, 1), {{.sequence = 0, .length = 16}}),
        row(cache, some_tokens(9, 2), {{.sequence = 1, .length = 9}})});
  for (std::int64_t i = 0; i < 2; ++i)
    pass({row(cache, some_tokens(1, 5 + i), {{.sequence = 0, .length = 1, .before = 16 + i}})});
  pass({row(cache, some_tokens(2, 7),
            {{.sequence = 0, .length = 1, .before = 18}, {.sequence = 1, .begin = 1, .length = 1, .before = 9}})});
  pass({row(cache, some_tokens(1, 8), {{.sequence = 0, .length = 1, .before = 19}}),
        row(cache, some_tokens(1, 9), {{.sequence = 1, .length = 1, .before = 10}})});
  return all;
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << "logits " << i;
}

class ExpertsOnDemand : public ::testing::TestWithParam<WeightFormat> {};

TEST_P(ExpertsOnDemand, have_the_bits_of_all_experts_under_every_budget) {
  DeviceMemory::install();
  const Folder folder;
  for (const Case& which : mixtures())
    for (const Tiling& tiling : {Tiling{}, kTiled}) {
      SCOPED_TRACE(which.name + (tiling.block_elements == 1 ? ", cut" : ""));
      const Model model = model_of(which, tiling, GetParam()), on_demand = with_experts_on_demand(model);
      Session all(model, for_generation(resident(2)));
      const auto expected = logits_of(all);
      EXPECT_FALSE(at::equal(expected.at(0), expected.at(1)));
      EXPECT_EQ(all.expert_use().all, 0U);
      {
        Session session(on_demand, for_generation(resident(2)));
        expect_same(logits_of(session), expected);
        EXPECT_GT(session.expert_use().needed, 0U);
      }
      {
        Session session(on_demand, least_device(on_demand, for_generation(resident(2))));
        expect_same(logits_of(session), expected);
      }
      for (const std::uint64_t chaos : {0, 5}) {
        SessionOptions options = stored(on_demand, for_generation(resident(2)), folder);
        options.chaos_seed = chaos;
        Session session(on_demand, chaos == 0 ? options : least_device(on_demand, options));
        expect_same(logits_of(session), expected);
        EXPECT_GT(session.expert_use().read, 0U);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, ExpertsOnDemand,
                         ::testing::Values(WeightFormat::bf16, WeightFormat::int8, WeightFormat::nf4),
                         [](const auto& format) { return std::string(weight_format_name(format.param)); });

// Where a tensor of several experts would be scaled in other groups, it stays whole.
TEST(ExpertUnits, are_left_together_where_their_bits_would_change) {
  const Model model = model_of(case_called("gpt_oss"), {}, WeightFormat::nf4_double);
  EXPECT_EQ(with_experts_on_demand(model).spec().units.size(), model.spec().units.size());
  // 41 columns: the last block of one expert would begin with the first of the next.
  Case odd = case_called("gpt_oss");
  odd.json = std::regex_replace(odd.json, std::regex(R"("intermediate_size": *\d+)"), R"("intermediate_size": 41)");
  for (const WeightFormat format : {WeightFormat::int8, WeightFormat::nf4, WeightFormat::bf16}) {
    const Model cut = model_of(odd, {}, format);
    EXPECT_EQ(with_experts_on_demand(cut).spec().units.size() > cut.spec().units.size(), format == WeightFormat::bf16);
  }
  const Model named = model_of(mixtral(4, 2), {}, WeightFormat::nf4_double);
  EXPECT_EQ(with_experts_on_demand(named).spec().units.size(), named.spec().units.size() + 2 * 4);
}

TEST(Experts, generate_the_tokens_of_all_experts) {
  DeviceMemory::install();
  const Folder folder;
  const GenerationOptions options{.sampling = {.sample = true, .top_k = 0}, .max_new_tokens = 6, .seed = 9};
  const std::vector<Tokens> prompts = {some_tokens(16, 1), some_tokens(3, 2), some_tokens(9, 3)};
  const auto tokens = [&](const Model& model, const SessionOptions& with) {
    Session session(model, with);
    std::vector<Tokens> all(prompts.size());
    generate(session, prompts, options,
             {.on_end = [&](std::size_t prompt, const Generated& result) { all[prompt] = result.tokens; }});
    return all;
  };
  const Model model = model_of(mixtral(16, 2), {}, WeightFormat::bf16);
  EXPECT_EQ(
      tokens(with_experts_on_demand(model), stored(with_experts_on_demand(model), for_generation(resident(3)), folder)),
      tokens(model, for_generation(resident(3))));
}

// What each row holds from its router to its last expert is planned for.
TEST(Experts, have_room_for_many_long_rows_on_the_least_device) {
  DeviceMemory::install();
  constexpr std::int64_t kRows = 24, kTokens = 1024;
  SessionOptions options = for_generation(resident(kRows));
  options.sequence_length = kTokens;
  Case wide = mixtral(16, 2);
  wide.json = std::regex_replace(wide.json, std::regex(R"("max_position_embeddings": *\d+)"),
                                 R"("max_position_embeddings": 2048)");
  const Model model = with_experts_on_demand(model_of(wide, {}, WeightFormat::bf16));
  const std::vector<Tokens> prompts(kRows, some_tokens(kTokens, 1));
  options.workspace = GenerationShape::of(model.spec(), prompts, {.max_new_tokens = 1}, kRows, kTokens).workspace;
  Session session(model, least_device(model, options));
  KeyValueCache cache(session.model().spec(), std::vector<std::int64_t>(kRows, kTokens));
  std::vector<CachedRow> rows;
  for (std::int64_t i = 0; i < kRows; ++i)
    rows.push_back(row(cache, some_tokens(kTokens, i), {{.sequence = i, .length = kTokens}}));
  EXPECT_EQ(session.next_logits(rows).size(), static_cast<std::size_t>(kRows));
}

// 2 layers of 16 experts, of which a token takes 2.
TEST(Experts, that_no_token_takes_are_not_fetched) {
  DeviceMemory::install();
  const Folder folder;
  const Model model = with_experts_on_demand(model_of(mixtral(16, 2), {}, WeightFormat::bf16));
  Session session(model, least_device(model, stored(model, for_generation(resident(1)), folder)));
  KeyValueCache cache(session.model().spec(), {40});
  const auto read = [&] { return session.lanes()[static_cast<std::size_t>(swap::Lane::disk_read)].bytes; };
  const std::uint64_t loaded = read();
  session.next_logits({row(cache, {3}, {{.length = 1}})});
  const ExpertUse one = session.expert_use();
  EXPECT_EQ(one.all, 32U);
  EXPECT_EQ(one.chosen, 4U);
  EXPECT_EQ(one.needed, 4U);
  EXPECT_EQ(one.fetched, 4U);
  EXPECT_EQ(one.read, 4U);
  const std::uint64_t of_one = read() - loaded;
  session.next_logits({row(cache, some_tokens(15, 4), {{.length = 15, .before = 1}})});
  EXPECT_LT(session.expert_use().needed - one.needed, 32U);  // 30 choices do not take all
  const std::uint64_t needed = session.expert_use().needed, before = read();
  KeyValueCache other(session.model().spec(), {16});
  session.next_logits({row(other, some_tokens(16, 4), {{.length = 16}})});
  EXPECT_LT(session.expert_use().needed - needed, 32U);
  EXPECT_LT(of_one, read() - before);
}

// Of 2 layers of 16 experts a token takes 4. Those of one that comes again stay when others come once.
TEST(Experts, that_are_used_more_stay_in_ram) {
  DeviceMemory::install();
  const Folder folder;
  const Model model = with_experts_on_demand(model_of(mixtral(16, 2), {}, WeightFormat::bf16));
  SessionOptions options = least_device(model, stored(model, for_generation(resident(1)), folder));
  const auto slots = [&] {
    const Session session(model, options);
    return session.plan().arrangement.cached_units;
  };
  EXPECT_EQ(slots(), 0);
  while (slots() < 4) options.host_memory += 64 << 10;
  Session session(model, options);
  ASSERT_LT(session.plan().arrangement.cached_units, 8);
  ExpertUse before;
  const auto pass = [&](std::int64_t token) {
    KeyValueCache cache(session.model().spec(), {1});
    before = session.expert_use();
    session.next_logits({row(cache, {token}, {{.length = 1}})});
  };
  const auto read = [&] { return session.expert_use().read - before.read; };
  pass(3);
  EXPECT_EQ(read(), 4U);
  pass(3);
  EXPECT_EQ(session.expert_use().needed - before.needed, 4U);
  EXPECT_EQ(read(), 0U);
  for (const std::int64_t once : {40, 50, 60}) {
    pass(once);
    pass(3);
    EXPECT_EQ(read(), 0U) << once;
  }
}

TEST(Experts, all_come_for_many_tokens) {
  DeviceMemory::install();
  const Model model = with_experts_on_demand(model_of(mixtral(4, 2), {}, WeightFormat::bf16));
  Session session(model, for_generation(resident(2)));
  KeyValueCache cache(session.model().spec(), {16, 16});
  session.next_logits(
      {row(cache, some_tokens(4, 1), {{.length = 4}}), row(cache, some_tokens(4, 2), {{.sequence = 1, .length = 4}})});
  EXPECT_EQ(session.expert_use().needed, 8U);  // 16 choices among 4
  EXPECT_GT(session.expert_use().chosen, 0U);
  EXPECT_EQ(session.expert_use().fetched, 8U);
  const ExpertUse many = session.expert_use();
  session.next_logits({row(cache, some_tokens(7, 1), {{.length = 7, .before = 4}})});
  EXPECT_EQ(session.expert_use().needed - many.needed, session.expert_use().chosen - many.chosen);  // 14 choices
  // The device has room for all: nothing is fetched twice.
  EXPECT_EQ(session.expert_use().fetched, 8U);
}

TEST(Experts, have_their_adapters) {
  DeviceMemory::install();
  const Folder folder;
  const AdapterConfig config{.rank = 4, .alpha = 32, .parameters = {"gate_up_proj", "down_proj"}};
  for (const char* name : {"mixtral", "gpt_oss"}) {
    SCOPED_TRACE(name);
    const Model base = model_of(case_called(name), {}, WeightFormat::nf4);
    {
      Session training(with_adapters(base, config, 5), resident(1));
      for (int step = 0; step < 2; ++step) training.step(batches(1, step), 0.1);
      training.export_adapter(folder.path / name);
    }
    const Model tuned = with_adapters(base, folder.path / name), on_demand = with_experts_on_demand(tuned);
    Session all(tuned, for_generation(resident(2))), plain(base, for_generation(resident(2)));
    Session session(on_demand, least_device(on_demand, for_generation(resident(2))));
    const auto expected = logits_of(all);
    EXPECT_FALSE(at::equal(logits_of(plain)[0], expected[0]));
    expect_same(logits_of(session), expected);
  }
}

TEST(Experts, evaluate_to_the_same_loss) {
  DeviceMemory::install();
  const Model model = model_of(case_called("qwen2_moe"), kTiled, WeightFormat::bf16);
  SessionOptions options = resident(2);
  options.train = false;
  Session all(model, options), session(with_experts_on_demand(model), options);
  EXPECT_EQ(session.evaluate(batches(3, 1)).loss, all.evaluate(batches(3, 1)).loss);
  EXPECT_GT(session.expert_use().needed, 0U);
}

TEST(Experts, are_not_trained) {
  DeviceMemory::install();
  const Model model = with_experts_on_demand(model_of(mixtral(4, 2), {}, WeightFormat::bf16));
  expect_refusal(io::ErrorKind::usage, {"not trained"}, [&] { const Session session(model, resident(1)); });
}

}  // namespace
}  // namespace tierflow::testing

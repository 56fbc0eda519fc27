// What a model folder says of how its text is drawn.
#include "runtime/spec/generation_config.h"

#include <gmock/gmock.h>

#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using ::testing::ElementsAre;
using testing::expect_refusal;
using ::testing::IsEmpty;

class GenerationConfigTest : public ::testing::Test {
 protected:
  GenerationConfigTest() { testing::write_file(folder_.path() / "config.json", R"({"eos_token_id": 9})"); }
  GenerationConfig read(std::string_view text) {
    testing::write_file(folder_.path() / "generation_config.json", text);
    return read_generation_config(folder_.path());
  }
  void refused(std::initializer_list<std::string_view> words, std::string_view text) {
    expect_refusal(io::ErrorKind::input, words, [&] { read(text); });
  }

  testing::TempDir folder_;
};

void expect_the_defaults(const Sampling& sampling) {
  EXPECT_FALSE(sampling.sample);
  EXPECT_EQ(sampling.temperature, 1);
  EXPECT_EQ(sampling.top_k, 50);
  EXPECT_EQ(sampling.top_p, 1);
  EXPECT_EQ(sampling.min_p, 0);
  EXPECT_EQ(sampling.repetition_penalty, 1);
  EXPECT_EQ(sampling.no_repeat_ngram_size, 0);
  EXPECT_EQ(sampling.min_new_tokens, 0);
  EXPECT_THAT(sampling.suppress_tokens, IsEmpty());
}

TEST_F(GenerationConfigTest, WhatItDoesNotSayIsAsTransformersHasIt) {
  const GenerationConfig none = read_generation_config(folder_.path());
  expect_the_defaults(none.sampling);
  EXPECT_THAT(none.stop_tokens, ElementsAre(9));
  for (const char* text : {"{}", R"({"top_k": null, "suppress_tokens": null, "eos_token_id": null})"}) {
    const GenerationConfig empty = read(text);
    expect_the_defaults(empty.sampling);
    EXPECT_THAT(empty.stop_tokens, ElementsAre(9));  // the model's own
    EXPECT_THAT(empty.not_applied, IsEmpty());
  }
}

TEST_F(GenerationConfigTest, EachFieldIsRead) {
  const Sampling sampling = read(R"({"do_sample": true, "temperature": 0.5, "top_k": 0, "top_p": 0.25, "min_p": 0.125,
        "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "suppress_tokens": [5, 0]})")
                                .sampling;
  EXPECT_TRUE(sampling.sample);
  EXPECT_EQ(sampling.temperature, 0.5);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.top_p, 0.25);
  EXPECT_EQ(sampling.min_p, 0.125);
  EXPECT_EQ(sampling.repetition_penalty, 1.5);
  EXPECT_EQ(sampling.no_repeat_ngram_size, 3);
  EXPECT_EQ(sampling.min_new_tokens, 4);
  EXPECT_THAT(sampling.suppress_tokens, ElementsAre(5, 0));
}

TEST_F(GenerationConfigTest, TextEndsWithAnyOfItsTokens) {
  EXPECT_THAT(read(R"({"eos_token_id": 0})").stop_tokens, ElementsAre(0));
  EXPECT_THAT(read(R"({"eos_token_id": [2, 7]})").stop_tokens, ElementsAre(2, 7));
  for (const char* bad : {"-1", "1.5", "\"2\"", "[2, -1]", "[[2]]", "2000000000000"})
    refused({"generation_config.json", "eos_token_id", "must be the id of a token, or a list of ids"},
            std::string(R"({"eos_token_id": )") + bad + "}");
  testing::write_file(folder_.path() / "config.json", R"({"eos_token_id": true})");
  refused({"/config.json", "eos_token_id"}, "{}");
}

TEST_F(GenerationConfigTest, OfTemperatureZeroIsTheMostLikelyToken) {
  EXPECT_FALSE(read(R"({"do_sample": true, "temperature": 0.0})").sampling.sample);
  EXPECT_TRUE(read(R"({"do_sample": true, "temperature": 0.01})").sampling.sample);
}

TEST_F(GenerationConfigTest, WhatIsOutOfRangeIsRefusedByName) {
  for (const char* field :
       {R"("do_sample": 1)", R"("temperature": -0.5)", R"("top_k": -1)", R"("top_k": 1.5)", R"("top_p": 1.5)",
        R"("top_p": -0.5)", R"("min_p": 1.5)", R"("min_p": -0.5)", R"("repetition_penalty": 0)",
        R"("no_repeat_ngram_size": -1)", R"("min_new_tokens": -1)", R"("suppress_tokens": ["a"])"}) {
    const std::string text(field);
    refused({"generation_config.json", text.substr(1, text.find('"', 1) - 1)}, "{" + text + "}");
  }
}

// A field counts as not applied where it would change the text: so a user is not told of those that do nothing.
TEST_F(GenerationConfigTest, NamesWhatWouldChangeTheTextAndIsNotKnownHere) {
  const std::vector<std::pair<std::string, std::string>> fields = {{"num_beams", "1"},
                                                                   {"typical_p", "1.0"},
                                                                   {"epsilon_cutoff", "0.0"},
                                                                   {"eta_cutoff", "0.0"},
                                                                   {"top_h", "null"},
                                                                   {"min_length", "0"},
                                                                   {"penalty_alpha", "0"},
                                                                   {"encoder_repetition_penalty", "1.0"},
                                                                   {"encoder_no_repeat_ngram_size", "0"},
                                                                   {"bad_words_ids", "null"},
                                                                   {"force_words_ids", "null"},
                                                                   {"constraints", "null"},
                                                                   {"forced_bos_token_id", "null"},
                                                                   {"forced_eos_token_id", "null"},
                                                                   {"begin_suppress_tokens", "null"},
                                                                   {"exponential_decay_length_penalty", "null"},
                                                                   {"sequence_bias", "null"},
                                                                   {"guidance_scale", "1"},
                                                                   {"watermarking_config", "null"},
                                                                   {"stop_strings", "null"},
                                                                   {"dola_layers", "null"}};
  std::string neutral = R"({"pad_token_id": 5, "transformers_version": "4.0")";
  for (const auto& [name, value] : fields) {
    neutral += ", \"" + name + "\": " + value;
    EXPECT_THAT(read("{\"" + name + "\": 3}").not_applied, ElementsAre(name));
  }
  EXPECT_THAT(read(neutral + "}").not_applied, IsEmpty());
  EXPECT_THAT(read(R"({"stop_strings": ["x"], "num_beams": 4})").not_applied, ElementsAre("num_beams", "stop_strings"));
}

}  // namespace
}  // namespace tierflow

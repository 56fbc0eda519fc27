#include "runtime/spec/rope_config.h"

#include <fmt/format.h>

#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/config_limits.h"

namespace tierflow {
namespace {

void need(const JsonFields& fields, const char* name) {
  if (fields.find(name) == nullptr) fields.fail(name, "is missing");
}

std::vector<double> factors(const JsonFields& fields, const char* name, std::int64_t count) {
  need(fields, name);
  const Json& list = *fields.find(name);
  if (!list.is_array() || static_cast<std::int64_t>(list.size()) != count)
    fields.fail(name, fmt::format("must list a factor for each of {} pairs of dimensions", count));
  std::vector<double> values;
  for (const Json& value : list) {
    if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > 1e6)
      fields.fail(name, "may hold positive numbers up to 1e6 only");
    values.push_back(value.get<double>());
  }
  return values;
}

void read_llama3(const JsonFields& fields, RopeSpec& rope) {
  for (const char* needed : {"low_freq_factor", "high_freq_factor"}) need(fields, needed);
  rope.low_freq_factor = fields.number_or("low_freq_factor", 1.0, 1e-6, 1e6);
  rope.high_freq_factor = fields.number_or("high_freq_factor", 4.0, 1e-6, 1e6);
  // Where both are the same (Llama 4 Scout), nothing lies between.
  if (rope.high_freq_factor < rope.low_freq_factor)
    fields.fail("high_freq_factor", "must not be below low_freq_factor");
}

// Peng et al., YaRN; the factor of cos and sin as DeepSeek extends it.
void read_yarn(const JsonFields& fields, RopeSpec& rope) {
  if (!(rope.theta > 1)) fields.fail("rope_theta", "must be above 1");
  rope.beta_fast = fields.number_or("beta_fast", 32.0, 1e-3, 1e6);
  rope.beta_slow = fields.number_or("beta_slow", 1.0, 1e-3, 1e6);
  rope.truncate = fields.boolean_or("truncate", true);
  const auto grown = [&](double scale) { return rope.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rope.factor) + 1.0; };
  const double scale = fields.number_or("mscale", 0, 0, 1e3), all = fields.number_or("mscale_all_dim", 0, 0, 1e3);
  const double implied = scale > 0 && all > 0 ? grown(scale) / grown(all) : grown(1.0);
  rope.attention_factor = fields.number_or("attention_factor", implied, 1e-3, 1e3);
}

// Ding et al., LongRoPE.
void read_longrope(const JsonFields& fields, std::int64_t pairs, RopeSpec& rope) {
  rope.short_factors = factors(fields, "short_factor", pairs);
  rope.long_factors = factors(fields, "long_factor", pairs);
  const double implied =
      rope.factor <= 1
          ? 1.0
          : std::sqrt(1 + std::log(rope.factor) / std::log(static_cast<double>(rope.original_max_positions)));
  rope.attention_factor = fields.number_or("attention_factor", implied, 1e-3, 1e3);
}

}  // namespace

RopeSpec read_rope(const JsonFields& fields, const ModelConfig& config, double theta, const RopeRule& rule,
                   const char* type) {
  RopeSpec rope;
  rope.theta = fields.number_or("rope_theta", theta, 1.0, 1e12);
  rope.partial = fields.number_or("partial_rotary_factor", rule.partial, 0.0, 1.0);
  if (fields.find("rope_parameters") != nullptr && fields.find("rope_scaling") != nullptr)
    fields.fail("rope_scaling", "stands beside rope_parameters: leave one of them");
  const char* name = fields.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* object = fields.find(name);
  std::string where = fields.where() + ": " + name;
  if (object != nullptr && !object->is_object()) fields.fail(name, "must be an object");
  // Of a model with types of layers rope_parameters has one object for each; rope_scaling is that of the full ones.
  if (object != nullptr && type != nullptr && fields.find("rope_parameters") != nullptr) {
    object = JsonFields(*object, where).find(type);
    if (object == nullptr) fields.fail(name, fmt::format("has nothing for {}", type));
    where += fmt::format(": {}", type);
    if (!object->is_object()) fail_input(where, "must be an object");
  } else if (object != nullptr && type == nullptr && object->contains("full_attention")) {
    fields.fail(name, "is for types of layers, of which this class has one");
  }
  const Json none = Json::object();
  const JsonFields scaling(object != nullptr ? *object : none, where);
  rope.theta = scaling.number_or("rope_theta", rope.theta, 1.0, 1e12);
  rope.partial = scaling.number_or("partial_rotary_factor", rope.partial, 0.0, 1.0);
  if (!rule.any && rope.partial != rule.partial)
    fields.fail("partial_rotary_factor", fmt::format("is {}; this class rotates {}", rope.partial, rule.partial));
  const std::int64_t rotated = rope.rotated(config.head_dim);
  if (rotated < 2 || rotated % 2 != 0)
    fields.fail(rope.partial == 1.0 ? "head_dim" : "partial_rotary_factor",
                fmt::format("makes {} dimensions of a head rotate; rotary embeddings need an even number", rotated));
  rope.type = scaling.text_or("rope_type", scaling.text_or("type", "default"));
  if (rope.type == "su") rope.type = "longrope";
  if (rule.alpha && rope.type == "dynamic" && scaling.find("alpha") != nullptr) {
    if (rotated < 4) fields.fail("head_dim", fmt::format("is {}; with an alpha it must be above 2", config.head_dim));
    const auto d = static_cast<double>(rotated);
    rope.theta *= std::pow(scaling.number_or("alpha", 1.0, 1e-6, 1e9), d / (d - 2));
    rope.type = "default";
    scaling.know({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"});  // may stand there unused
  }
  if (rope.type == "default") return rope;
  if (rope.type != "linear" && rope.type != "llama3" && rope.type != "yarn" && rope.type != "longrope")
    scaling.fail("rope_type",
                 fmt::format("is \"{}\"; supported are default, linear, llama3, yarn, longrope", printable(rope.type)));
  if (rope.type == "llama3") read_llama3(scaling, rope);
  if (rope.type != "linear") {
    // transformers takes the one outside where there are two.
    const char* original = "original_max_position_embeddings";
    const std::int64_t outside = fields.integer_or(original, 0, 2, limits::positions);
    if (outside == 0) need(scaling, original);
    rope.original_max_positions = outside != 0 ? outside : scaling.integer(original, 2, limits::positions);
  }
  if (scaling.find("factor") == nullptr && (rope.type == "yarn" || rope.type == "longrope")) {
    rope.factor = static_cast<double>(config.max_positions) / static_cast<double>(rope.original_max_positions);
  } else {
    need(scaling, "factor");
    rope.factor = scaling.number_or("factor", 1.0, 1.0, 1e6);
  }
  if (rope.type == "yarn") read_yarn(scaling, rope);
  if (rope.type == "longrope") read_longrope(scaling, rotated / 2, rope);
  return rope;
}

std::vector<bool> sliding_layers(const JsonFields& fields, const ModelConfig& config, std::int64_t period,
                                 const char* slides) {
  std::vector<bool> sliding;
  const Json* types = fields.find("layer_types");
  if (types == nullptr) {
    for (std::int64_t i = 0; i < config.layers; ++i) sliding.push_back(period > 0 && (i + 1) % period != 0);
    return sliding;
  }
  if (!types->is_array() || static_cast<std::int64_t>(types->size()) != config.layers)
    fields.fail("layer_types", fmt::format("must list the attention of each of the {} layers", config.layers));
  for (const Json& type : *types) {
    if (type != "full_attention" && type != slides)
      fields.fail("layer_types", fmt::format("may hold full_attention and {} only", slides));
    sliding.push_back(type == slides);
  }
  return sliding;
}

std::vector<bool> rotary_layers(const JsonFields& fields, const ModelConfig& config) {
  std::vector<bool> turns;
  const std::int64_t period = fields.integer_or("no_rope_layer_interval", 4, 1, limits::layers);
  const Json* rotary = fields.find("no_rope_layers");  // 1: the layer has positions
  if (rotary == nullptr || *rotary == Json::array()) {
    for (std::int64_t i = 0; i < config.layers; ++i) turns.push_back((i + 1) % period != 0);
    return turns;
  }
  if (!rotary->is_array() || static_cast<std::int64_t>(rotary->size()) != config.layers)
    fields.fail("no_rope_layers", fmt::format("must list 0 or 1 for each of the {} layers", config.layers));
  for (const Json& layer : *rotary) {
    if (layer != Json(0) && layer != Json(1)) fields.fail("no_rope_layers", "may hold 0 and 1 only");
    turns.push_back(layer == Json(1));
  }
  return turns;
}

}  // namespace tierflow

#include "runtime/spec/packing.h"

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/spec/token_tables.h"

namespace tierflow {
namespace {

constexpr const char* kPrecisionNames[] = {"fp32-master+adam8", "fp32-master+adam32", "bf16-sr+adam8"};

StateFormat format_of(const TensorSpec& tensor, Precision precision) {
  StateFormat format;
  if (precision == Precision::bf16_sr_adam8) format.master = optim::MasterFormat::bf16_sr;
  const bool eight_bits = precision != Precision::fp32_master_adam32 && !tensor.moments_32;
  format.moments = eight_bits ? optim::MomentFormat::block8 : optim::MomentFormat::f32;
  return format;
}

// The groups of a unit, in this order: so that a chunk has one format.
enum class Kind : std::uint8_t { moments_8, moments_32, rewritten_master, rewritten_words, frozen };
constexpr Kind kKinds[] = {Kind::moments_8, Kind::moments_32, Kind::rewritten_master, Kind::rewritten_words,
                           Kind::frozen};

Kind kind_of(const TensorSpec& tensor, const StateFormat& format) {
  if (tensor.trainable) return format.moments == optim::MomentFormat::block8 ? Kind::moments_8 : Kind::moments_32;
  if (tensor.rewritten == Rewritten::never) return Kind::frozen;
  return tensor.rewritten == Rewritten::master && format.master == optim::MasterFormat::split ? Kind::rewritten_master
                                                                                              : Kind::rewritten_words;
}

swap::GroupShape group_of(const StateFormat& format, Kind kind, std::uint64_t elements) {
  if (kind == Kind::frozen) return {.trainable = false, .elements = elements, .precision = "bf16"};
  if (kind == Kind::rewritten_words)
    return {.trainable = false, .rewritten = true, .elements = elements, .precision = "bf16"};
  if (kind == Kind::rewritten_master)
    return {.trainable = false,
            .rewritten = true,
            .elements = elements,
            .state_bytes_element = 2,
            .precision = "fp32-master"};
  const bool eight_bits = format.moments == optim::MomentFormat::block8,
             split = format.master == optim::MasterFormat::split;
  return {.elements = elements,
          .state_bytes_element = (split ? 2U : 0U) + (eight_bits ? 2U : 8U),
          .state_bytes_block = eight_bits ? 8U : 0U,
          .precision = std::string(split ? "fp32-master" : "bf16-sr") + (eight_bits ? "+adam8" : "+adam32")};
}

}  // namespace

Precision parse_precision(std::string_view name) {
  for (int i = 0; i < 3; ++i)
    if (name == kPrecisionNames[i]) return static_cast<Precision>(i);
  fail_usage("--precision " + std::string(name) +
             " is unknown: use fp32-master+adam8, fp32-master+adam32 or bf16-sr+adam8");
}

const char* precision_name(Precision precision) {
  return kPrecisionNames[static_cast<int>(precision)];
}

std::vector<std::pair<StateFormat, std::string>> state_formats(Precision precision) {
  std::vector<std::pair<StateFormat, std::string>> formats;
  for (const bool moments_32 : {false, true}) {
    const StateFormat format = format_of({.moments_32 = moments_32}, precision);
    if (formats.empty() || formats.back().first.moments != format.moments)
      formats.emplace_back(format, group_of(format, Kind::moments_8, 0).precision);
  }
  return formats;
}

PackedModel pack(const ModelSpec& spec, Precision precision, std::uint64_t embedding_part) {
  PackedModel model;
  model.precision = precision;
  const std::vector<TokenTable> tables = embedding_part != 0 ? token_tables(spec) : std::vector<TokenTable>{};
  for (const UnitSpec& unit : spec.units) {
    const auto is_table = [&](int tensor) {
      return std::ranges::any_of(
          tables, [&](const TokenTable& table) { return &spec.units[table.unit] == &unit && table.tensor == tensor; });
    };
    PackedUnit packed;
    packed.shape.name = unit.name;
    std::uint64_t offset = 0;
    for (const Kind kind : kKinds) {
      const std::uint64_t begin = offset;
      StateFormat format;
      bool sparse = false;
      for (int index = 0; index < static_cast<int>(unit.tensors.size()); ++index) {
        const TensorSpec& tensor = unit.tensors[index];
        const StateFormat wanted = format_of(tensor, precision);
        if (kind_of(tensor, wanted) != kind) continue;
        format = wanted;
        sparse = sparse || is_table(index);
        format.updated = tensor.trainable;
        if (kind == Kind::rewritten_words) format.master = optim::MasterFormat::bf16_sr;
        const std::uint64_t elements = tensor.words();
        if (tensor.trainable) model.trainable_parameters += elements;
        packed.tensors.push_back({.tensor = index,
                                  .offset = offset,
                                  .elements = elements,
                                  .decays = tensor.decays,
                                  .lr_scale = static_cast<float>(tensor.lr_scale)});
        offset += swap::round_up(elements, optim::kBlock);
      }
      if (offset == begin) continue;
      offset = begin + swap::round_up(offset - begin, swap::kElementsPad);
      packed.formats.push_back(format);
      packed.shape.groups.push_back(group_of(format, kind, offset - begin));
      if (sparse) packed.shape.groups.back().sparse_elements = embedding_part;
    }
    model.units.push_back(std::move(packed));
  }
  for (const StageSpec& stage : spec.stages)
    model.stages.push_back(
        {.units = stage.units, .on_demand = stage.on_demand, .backward_needs_weights = stage.backward_needs_weights});
  return model;
}

std::vector<StatePart> state_parts(const StateFormat& format) {
  std::vector<StatePart> parts;
  if (format.master == optim::MasterFormat::split) parts.push_back({":lo", "U16", 2, 1});
  if (!format.updated) return parts;
  if (format.moments != optim::MomentFormat::block8)
    parts.insert(parts.end(), {{":m", "F32", 4, 1}, {":v", "F32", 4, 1}});
  else
    parts.insert(parts.end(), {{":m", "U8", 1, 1},
                               {":v", "U8", 1, 1},
                               {":m_scale", "F32", 4, optim::kBlock},
                               {":v_scale", "F32", 4, optim::kBlock}});
  return parts;
}

std::vector<TensorPiece> pieces_of(const PackedModel& model, const swap::Chunk& chunk, std::uint64_t most) {
  std::vector<TensorPiece> pieces;
  const std::vector<PackedTensor>& tensors = model.units[chunk.unit].tensors;
  const std::uint64_t chunk_end = chunk.first + chunk.elements;
  const auto before = [&](const PackedTensor& tensor) { return tensor.offset + tensor.elements <= chunk.first; };
  for (auto at = std::ranges::partition_point(tensors, before); at != tensors.end() && at->offset < chunk_end; ++at) {
    const std::uint64_t end = std::min(at->offset + at->elements, chunk_end);
    for (std::uint64_t begin = std::max(at->offset, chunk.first), next = 0; begin < end; begin = next) {
      const std::uint64_t in_chunk = begin - chunk.first;
      next = begin + std::min(most - in_chunk % most, end - begin);
      pieces.push_back(
          {.tensor = &*at, .in_tensor = begin - at->offset, .in_chunk = in_chunk, .elements = next - begin});
    }
  }
  return pieces;
}

std::uint64_t parameters_in(const PackedModel& model, const swap::Chunk& chunk) {
  std::uint64_t sum = 0;
  for (const TensorPiece& piece : pieces_of(model, chunk)) sum += piece.elements;
  return sum;
}

optim::State state_view(const StateFormat& format, std::uint64_t elements, std::uint16_t* words, std::byte* state) {
  optim::State view;
  view.master = format.master;
  view.hi = words;
  if (format.master == optim::MasterFormat::split) {
    view.lo = reinterpret_cast<std::uint16_t*>(state);
    state += 2 * elements;
  }
  const bool eight_bits = format.moments == optim::MomentFormat::block8;
  const std::uint64_t bytes = elements * (eight_bits ? 1 : 4);
  view.m = {.format = format.moments, .values = state};
  view.v = {.format = format.moments, .values = state + bytes};
  if (eight_bits) {
    view.m.absmax = reinterpret_cast<float*>(state + 2 * bytes);
    view.v.absmax = view.m.absmax + elements / optim::kBlock;
  }
  return view;
}

std::uint64_t rounding_key(std::uint64_t seed, int unit, int tensor) {
  return seed ^ (static_cast<std::uint64_t>(unit) << 32 | static_cast<std::uint64_t>(tensor));
}

std::uint64_t chunk_elements_for(std::uint64_t host_budget) {
  // Ten bytes an element pass through buffers at once; a chunk takes at most a twentieth of the budget, between 64 Ki
  // and 8 Mi elements.
  const std::uint64_t elements = host_budget / 200 / swap::kChunkQuantum * swap::kChunkQuantum;
  return std::clamp<std::uint64_t>(elements, swap::kChunkQuantum, 128 * swap::kChunkQuantum);
}

}  // namespace tierflow

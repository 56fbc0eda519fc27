#include "runtime/checkpoint/source_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/packed_weight.h"
#include "runtime/spec/wrapped_config.h"

namespace tierflow {
namespace {

bool have_the_same_values(const Checkpoint& checkpoint, const std::string& one, const std::string& other) {
  const std::vector<std::int64_t>& shape = checkpoint.find(one)->shape;
  if (checkpoint.find(other)->shape != shape) return false;
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements *= static_cast<std::uint64_t>(size);
  std::vector<float> a(std::min<std::uint64_t>(elements, 1 << 20)), b(a.size());
  for (std::uint64_t first = 0; first < elements; first += a.size()) {
    const std::size_t count = std::min<std::uint64_t>(a.size(), elements - first);
    checkpoint.read_f32(std::string_view(one), first, std::span(a).first(count));
    checkpoint.read_f32(std::string_view(other), first, std::span(b).first(count));
    if (std::memcmp(a.data(), b.data(), count * sizeof a[0]) != 0) return false;
  }
  return true;
}

bool is_head(std::string_view name) {
  return name == "lm_head.weight" || name == "model.lm_head.weight" || name == "language_model.lm_head.weight";
}

// Which tensors of a folder belong to other parts than its language model.
class Beside {
 public:
  Beside(const ModelSpec& spec, const Checkpoint& checkpoint)
      : wraps_(!spec.wrapper.empty()), layers_(spec.config.layers), experts_(spec.config.experts.count > 0) {
    const DecoderNames& names = spec.config.names;
    const std::string table = checkpoint.name_in_files(names.prefix + names.tokens);
    if (table.ends_with(names.tokens)) text_ = table.substr(0, table.size() - names.tokens.size());
  }

  bool has(std::string_view name) const { return is_behind(name) || (wraps_ && is_outside(name)); }

 private:
  // Layers behind the last one predict several tokens at once (GLM-4.5).
  bool is_behind(std::string_view name) const {
    const std::string layers = text_ + "layers.";
    if (!experts_ || !name.starts_with(layers)) return false;
    const std::string number(name.substr(layers.size(), name.find('.', layers.size()) - layers.size()));
    return !number.empty() && number.size() < 6 && number.find_first_not_of("0123456789") == std::string::npos &&
           std::stoll(number) >= layers_;
  }
  // Where the language model's tensors share their beginning with nothing else, all others are; else those of parts
  // that are known.
  bool is_outside(std::string_view name) const {
    if (text_.find("language_model.") != std::string::npos) return !name.starts_with(text_) && !is_head(name);
    return is_beside_text(name);
  }

  const bool wraps_;
  const std::int64_t layers_;
  const bool experts_;
  std::string text_ = "model.";  // how the names of the language model's tensors begin
};

constexpr std::size_t kPieceBytes = 4 << 20;

}  // namespace

void check_tensors(const ModelSpec& spec, const Checkpoint& checkpoint, const std::string& described_by) {
  constexpr int listed = 10;
  std::vector<std::string> wrong;
  const auto& stored = checkpoint.stored();
  std::set<const TensorEntry*> used;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (tensor.first_row != 0) continue;  // looked at with its first tile
      const std::vector<std::int64_t> shape = tensor.checkpoint_shape();
      const TensorEntry* entry = checkpoint.find(tensor.name);
      if (entry != nullptr) {
        used.insert(entry);
        if (entry->shape != shape)
          wrong.push_back(fmt::format("{} has shape [{}], not [{}]", tensor.name, fmt::join(entry->shape, ", "),
                                      fmt::join(shape, ", ")));
      } else if (const auto unread = stored.find(tensor.name); unread != stored.end()) {
        const std::string& dtype = unread->second.dtype;
        wrong.push_back(fmt::format("{} is stored as {}; F32, BF16 and F16 are read{}", tensor.name, dtype,
                                    dtype == "F8_E4M3" || dtype == "I8" ? ", and this type beside its scales" : ""));
      } else {
        wrong.push_back(tensor.name + " is missing");
      }
    }
  const std::string& head = spec.config.names.head;
  if (spec.config.tie_word_embeddings && wrong.empty() && checkpoint.find(head) != nullptr) {
    const std::string& tokens = spec.units.front().tensors.front().name;
    if (!have_the_same_values(checkpoint, head, tokens))
      wrong.push_back(fmt::format("{} is not {}, though tie_word_embeddings says so: write false there", head, tokens));
  }
  const Beside beside(spec, checkpoint);
  // Tables that older versions of transformers saved, and the copy of a tied embedding, are no parameters.
  const bool neox = spec.config.names.prefix == "gpt_neox.";
  const auto harmless = [&](std::string_view name) {
    return name.ends_with("rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
           name.ends_with(".attn.masked_bias") ||
           (neox && (name.ends_with(".attention.bias") || name.ends_with(".attention.masked_bias"))) ||
           beside.has(name) || ((is_head(name) || name == head) && spec.config.tie_word_embeddings);
  };
  for (const auto& [name, entry] : checkpoint.tensors())
    if (used.count(&entry) == 0 && !harmless(name))
      wrong.push_back(printable(name) + " is not a parameter of the model");
  if (wrong.empty()) return;
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(wrong.size(), listed); ++i) text += (i == 0 ? "" : "; ") + wrong[i];
  if (wrong.size() > listed) text += fmt::format("; and {} more", wrong.size() - listed);
  fail_input(checkpoint.folder().string(), fmt::format("does not fit its {}: {}", described_by, text));
}

SourceFolder::SourceFolder(const ModelSpec& spec, std::shared_ptr<const Checkpoint> checkpoint)
    : checkpoint_(std::move(checkpoint)),
      wraps_(!spec.wrapper.empty()),
      config_json_(wraps_ ? spec.wrapper_config_json : spec.config_json) {
  const Beside beside(spec, *checkpoint_);
  std::set<std::string> names;  // quantised ones have no entry among those that are stored as they are
  for (const auto& [name, tensor] : checkpoint_->stored())
    if (beside.has(name)) names.insert(name);
  for (const auto& [name, tensor] : checkpoint_->tensors())
    if (tensor.packed != nullptr && beside.has(name)) names.insert(name);
  others_.assign(names.begin(), names.end());
}

std::string SourceFolder::name_of(const TensorSpec& tensor) const {
  return wraps_ ? checkpoint_->name_in_files(tensor.name) : tensor.name;
}

std::vector<TensorHeader> SourceFolder::headers() const {
  std::vector<TensorHeader> headers;
  for (const std::string& name : others_) {
    const auto stored = checkpoint_->stored().find(name);
    if (stored == checkpoint_->stored().end())
      headers.push_back({.name = name, .shape = checkpoint_->find(name)->shape});
    else
      headers.push_back({.name = name,
                         .shape = stored->second.shape,
                         .stored_dtype = stored->second.dtype,
                         .stored_bytes = stored->second.bytes});
  }
  return headers;
}

std::uint64_t SourceFolder::bytes() const {
  std::uint64_t sum = 0;
  for (const std::string& name : others_) {
    const auto stored = checkpoint_->stored().find(name);
    sum += stored == checkpoint_->stored().end()
               ? checkpoint_->find(name)->bytes / 2  // of fp32 values, written as bf16
               : stored->second.bytes;
  }
  return sum;
}

// Gives `take` what write() writes, piece by piece. Returns the hash.
std::uint64_t SourceFolder::read(const char* phase, const Progress& progress,
                                 const std::function<void(std::span<const std::byte>)>& take) const {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, config_json_.data(), config_json_.size());
  for (const TensorHeader& header : headers()) {
    const std::string line =
        fmt::format("{}\n{} [{}]\n", header.name, header.stored_dtype, fmt::join(header.shape, ", "));
    XXH3_64bits_update(&state, line.data(), line.size());
  }
  std::uint64_t done = 0;
  const std::uint64_t total = bytes();
  const auto give = [&](std::span<const std::byte> piece) {
    XXH3_64bits_update(&state, piece.data(), piece.size());
    if (take) take(piece);
    done += piece.size();
    if (progress) progress(phase, done, total);
  };
  std::vector<std::byte> piece;
  std::vector<float> values;
  std::vector<std::uint16_t> words;
  for (const std::string& name : others_) {
    if (const auto stored = checkpoint_->stored().find(name); stored != checkpoint_->stored().end()) {
      for (std::uint64_t at = 0; at < stored->second.bytes; at += piece.size()) {
        piece.resize(std::min<std::uint64_t>(kPieceBytes, stored->second.bytes - at));
        checkpoint_->read_stored(stored->second, at, piece);
        give(piece);
      }
      continue;
    }
    const std::uint64_t elements = checkpoint_->find(name)->bytes / sizeof(float);
    for (std::uint64_t at = 0; at < elements; at += values.size()) {
      values.resize(std::min<std::uint64_t>(kPieceBytes / sizeof(float), elements - at));
      checkpoint_->read_f32(std::string_view(name), at, values);
      words.resize(values.size());
      std::ranges::transform(values, words.begin(), to_bf16);
      give(std::as_bytes(std::span(words)));
    }
  }
  return XXH3_64bits_digest(&state);
}

std::uint64_t SourceFolder::hash(const Progress& progress) const {
  return read("reading the parts that are not trained", progress, {});
}

void SourceFolder::write(CheckpointWriter& writer, std::optional<std::uint64_t> hash, const Progress& progress) const {
  const std::uint64_t found = read("copying the parts that are not trained", progress,
                                   [&](std::span<const std::byte> piece) { writer.write(piece); });
  if (hash && *hash != found)
    fail_input(folder().string(),
               "its parts beside the language model are not those that the run began with: put these back");
}

}  // namespace tierflow

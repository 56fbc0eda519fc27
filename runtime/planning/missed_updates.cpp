#include "runtime/planning/missed_updates.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/base/exception.h"

namespace tierflow {

std::uint64_t embedding_part_of(const std::string& identity) {
  const auto found = nlohmann::json::parse(identity, nullptr, false);
  const auto rows = found.is_object() ? found.find("rows") : found.end();
  if (!found.is_object() || rows == found.end()) return 0;
  if (*rows == true) return swap::kChunkQuantum;  // of stores that name no size
  const auto elements = rows->is_number_unsigned() ? rows->get<std::uint64_t>() : 0;
  return elements % swap::kSparseQuantum == 0 && elements <= swap::kChunkQuantum ? elements : 0;
}

MissedUpdates::MissedUpdates(const swap::Layout& layout, const SteadyAdamW& adamw, std::int64_t updates)
    : layout_(&layout), adamw_(adamw), updates_(updates), had_(layout.chunks().size(), updates) {}

void MissedUpdates::add(float lr) {
  if (layout_->sparse_chunks().empty()) return;
  ++updates_;
  lr_.push_back(lr);
  forget_old();
}

// Learning rates of updates that every chunk has had.
void MissedUpdates::forget_old() {
  std::int64_t most = 0;
  for (const int chunk : layout_->sparse_chunks()) most = std::max(most, count(chunk));
  lr_.erase(lr_.begin(), lr_.end() - static_cast<std::ptrdiff_t>(most));
}

bool MissedUpdates::any() const {
  return std::ranges::any_of(layout_->sparse_chunks(), [this](int chunk) { return missed(chunk); });
}

void MissedUpdates::replay(const PackedModel& model, const swap::Chunk& chunk, std::span<std::byte> words,
                           std::span<std::byte> state, const Each& each) const {
  constexpr std::uint64_t kPart = 16 * optim::kBlock;  // so that one chunk keeps several threads busy
  const std::vector<TensorPiece> pieces = pieces_of(model, chunk, kPart);
  const optim::State view = state_view(model.units[chunk.unit].formats[chunk.group], chunk.elements,
                                       reinterpret_cast<std::uint16_t*>(words.data()), state.data());
  const std::span rates = std::span(lr_).last(static_cast<std::size_t>(count(chunk.id)));
  each(pieces.size(), [&](std::size_t index) {
    const TensorPiece& piece = pieces[index];
    std::vector<optim::AdamWParams> updates;
    for (const float lr : rates)
      updates.push_back({.lr = lr * piece.tensor->lr_scale,
                         .beta1 = adamw_.beta1,
                         .beta2 = adamw_.beta2,
                         .eps = adamw_.eps,
                         .weight_decay = piece.tensor->decays ? adamw_.weight_decay : 0.0F,
                         .step = had_[chunk.id] + 1 + static_cast<std::int64_t>(updates.size()),
                         .rounding_key = rounding_key(adamw_.seed, chunk.unit, piece.tensor->tensor),
                         .first_element = piece.in_tensor});
    optim::adamw_catch_up(updates, optim::state_from(view, piece.in_chunk), piece.elements);
  });
}

// Chunks of a unit in runs that have missed the same number: units keep their names, and sparse chunks their size,
// however a store is cut.
std::string MissedUpdates::json() const {
  nlohmann::json missed = nlohmann::json::object();
  for (const int chunk : layout_->sparse_chunks()) {
    nlohmann::json& runs = missed[layout_->units()[layout_->chunks()[chunk].unit].name];
    if (runs.empty() || runs.back()[1] != count(chunk)) runs.push_back({0, count(chunk)});
    runs.back()[0] = runs.back()[0].get<std::int64_t>() + 1;
  }
  return nlohmann::json{{"learning_rates", lr_},
                        {"adamw", {adamw_.beta1, adamw_.beta2, adamw_.eps, adamw_.weight_decay}},
                        {"seed", adamw_.seed},
                        {"missed", missed}}
      .dump();
}

MissedUpdates::MissedUpdates(const swap::Layout& layout, std::int64_t updates, const std::string& text,
                             const std::string& where)
    : MissedUpdates(layout, SteadyAdamW{}, updates) {
  const auto refuse = [&] {
    throw Exception(io::Error{.kind = io::ErrorKind::corruption,
                              .path = where,
                              .detail = "what the store says of the updates that parts of it have missed is not of "
                                        "this model, or damaged"});
  };
  try {
    const auto found = nlohmann::json::parse(text);
    lr_ = found.at("learning_rates").get<std::vector<float>>();
    const auto adamw = found.at("adamw").get<std::array<float, 4>>();
    adamw_ = {adamw[0], adamw[1], adamw[2], adamw[3], found.at("seed").get<std::uint64_t>()};
    const auto all = static_cast<std::int64_t>(lr_.size());
    if (all > updates) refuse();
    auto chunk = layout.sparse_chunks().begin();
    while (chunk != layout.sparse_chunks().end()) {
      const int unit = layout.chunks()[*chunk].unit;
      for (const nlohmann::json& run : found.at("missed").at(layout.units()[unit].name)) {
        const auto length = run.at(0).get<std::int64_t>(), missed = run.at(1).get<std::int64_t>();
        if (missed < 0 || missed > all) refuse();
        for (std::int64_t i = 0; i < length; ++i, ++chunk) {
          if (chunk == layout.sparse_chunks().end() || layout.chunks()[*chunk].unit != unit) refuse();
          had_[*chunk] = updates - missed;
        }
      }
      if (chunk != layout.sparse_chunks().end() && layout.chunks()[*chunk].unit == unit) refuse();
    }
  } catch (const nlohmann::json::exception&) {
    refuse();
  }
}

}  // namespace tierflow

#pragma once
// The trained tensors of a Streamer in one safetensors file, exactly: for each tensor NAME its bf16 words under NAME,
// the low words of its master under NAME:lo (U16), its moments under NAME:m and NAME:v (F32, or U8 with a scale a
// block under NAME:m_scale and NAME:v_scale). What the file holds depends on no budget: any arrangement can load it.
// Throws Exception.
#include <filesystem>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/state/streamed_state.h"

namespace tierflow {

// Writes the file under a temporary name; durable, under its own name, when the call returns. Between plans.
void save_stream_state(StreamedState& state, const std::filesystem::path& path, const Progress& progress);

// If the file is refused (another model, shape or precision), nothing has changed. A later error of the file or of
// storage leaves the state torn.
void load_stream_state(StreamedState& state, const std::filesystem::path& path, const Progress& progress);

}  // namespace tierflow

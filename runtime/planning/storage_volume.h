#pragma once
// The volume in which options of any kind ask for a store.
#include "io/volume.h"

namespace tierflow {

// Of SessionOptions, StreamerOptions and TrainOptions.
template <class Options>
io::VolumeOptions volume_in(const Options& options, io::EngineKind engine) {
  return {.folders = options.storage,
          .engine = engine,
          .allow_buffered = options.allow_buffered,
          .allow_any_filesystem = options.allow_any_filesystem};
}

}  // namespace tierflow

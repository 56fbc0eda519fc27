#pragma once
// Everything a LibTorch program needs: load() or Layers for the model, Dataset for what
// it learns from, Session for its training, generate() for its text.
#include <torch/torch.h>

#include "runtime/base/byte_sizes.h"
#include "runtime/base/exception.h"
#include "runtime/batches/data_batches.h"
#include "runtime/data/data.h"
#include "runtime/optimizer/adamw8bit.h"
#include "runtime/planning/moved_store.h"
#include "runtime/session/generator.h"
#include "runtime/session/layers.h"
#include "runtime/session/session.h"

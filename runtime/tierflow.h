#pragma once
// Everything a LibTorch program needs: load() or Layers for the model, Dataset for what it learns from, Session for its
// training, generate() for its text. For losses of pairs SessionOptions::loss and row_log_probabilities(), for a
// teacher's tokens TeacherFile and add_teacher(), for projected gradients with_adapters() with AdapterInit::galore.
#include <torch/torch.h>

#include "runtime/base/byte_sizes.h"
#include "runtime/base/exception.h"
#include "runtime/batches/data_batches.h"
#include "runtime/batches/teacher_batches.h"
#include "runtime/data/data.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/pair_batch.h"
#include "runtime/optimizer/adamw8bit.h"
#include "runtime/planning/moved_store.h"
#include "runtime/session/generator.h"
#include "runtime/session/layers.h"
#include "runtime/session/session.h"

#pragma once
// Everything a LibTorch program needs: load() or Layers for the model, Session for its training.
#include "runtime/adamw8bit.h"
#include "runtime/exception.h"
#include "runtime/layers.h"
#include "runtime/session.h"

// Includes all protocol headers. The headers transcribe iris-sync operation by operation;
// PROTOCOL.md of that crate gives the reasons. Each header has the name of its Rust counterpart and
// defines the same names; `cargo xtask tidy` compares them. The headers are listed in the order of
// their layers, and each header includes those that it needs.
//
// All threads of a workgroup call the functions of Workgroup together. If a function returns false,
// it returns false on all threads, and the workgroup must then end its part of the call.
#ifndef IRIS_SYNC_H
#define IRIS_SYNC_H

#include "iris/sym.h"

#include "iris/call.h"
#include "iris/fault.h"

#include "iris/memory.h"

#include "iris/channel.h"

#include "iris/wait.h"

#include "iris/barrier.h"
#include "iris/entry.h"
#include "iris/epoch.h"
#include "iris/ll.h"
#include "iris/lock.h"
#include "iris/tile_flags.h"

#include "iris/workgroup.h"

#endif

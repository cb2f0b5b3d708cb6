// The protocols of iris-sync, operation by operation: see that crate and its PROTOCOL.md for the
// reasons. A header has the name of its Rust twin, and what is in it the same names: `cargo xtask tidy`
// compares them. They stand here in the order of their layers; each includes those that it needs.
//
// All threads of a workgroup call the functions of Workgroup together; those that return false do so on
// all threads alike, and the workgroup must then leave.
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

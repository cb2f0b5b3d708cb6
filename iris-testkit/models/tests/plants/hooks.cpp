// Runs each protocol of the device headers once, and all entries of the kernel file
// IRIS_PLANT_FILE, over hooks that print. They print "scope ..." if an access to a peer's word does
// not have system scope, and "access NUMBER ORDER SCOPE" for each access of the protocols.
// Addresses from 2^60 on are symmetric.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>

#include "iris/sync.h"

using namespace iris;

static std::set<std::tuple<bool, int, int, int>> seen;

static void see(u64 address, int order, int scope, int access) {
    const bool symmetric = address >> 60 == 1;
    if (!seen.insert({symmetric, access, order, scope}).second) return;
    if (symmetric && scope != 1) std::printf("scope %d of a peer's word\n", scope);
    if (access >= 0) std::printf("access %d %d %d\n", access, order, scope);
}

extern "C" {
u32 iris_hook_thread() { return 0; }
u32 iris_hook_threads() { return 1; }
u32 iris_hook_workgroup() { return 0; }
u32 iris_hook_workgroups() { return 1; }
int iris_hook_vote(int ok, int) { return ok; }
void iris_hook_diverge() {}
void iris_hook_reconverge() {}
u64 iris_hook_now() { return 0; }
void iris_hook_pause(u32) {}
int iris_hook_expired(int, u32, u64) { return 1; }
int iris_hook_reached(int, i32, i32, int) { return 1; }
int iris_hook_is_of(int, i32, i32, int) { return 1; }
i32 iris_hook_host_abort(u64) { return 0; }
void iris_hook_record(u64, const i32*) {}
i32 iris_hook_load32(u64 a, int o, int s, int n) { see(a, o, s, n); return 0; }
void iris_hook_store32(u64 a, i32, int o, int s, int n) { see(a, o, s, n); }
i32 iris_hook_rmw32(u64 a, int, i32, int o, int s, int n) { see(a, o, s, n); return 0; }
i32 iris_hook_cas32(u64 a, i32, i32, int o, int s, int n) { see(a, o, s, n); return 0; }
void iris_hook_load_quad(u64 a, u32* words, int o, int s, int n) {
    see(a, o, s, n);
    for (u32 i = 0; i < 4; ++i) words[i] = 0;
}
void iris_hook_store_quad(u64 a, const u32*, int o, int s, int n) { see(a, o, s, n); }
i64 iris_hook_load64(u64 a, int o, int s, int n) { see(a, o, s, n); return 0; }
void iris_hook_store64(u64 a, i64, int o, int s, int n) { see(a, o, s, n); }
i64 iris_hook_rmw64(u64 a, int, i64, int o, int s, int n) { see(a, o, s, n); return 0; }
i64 iris_hook_cas64(u64 a, i64, i64, int o, int s, int n) { see(a, o, s, n); return 0; }
void iris_hook_add_f32(u64 a, float, int s) { see(a, 0, s, -1); }
void iris_hook_fence(int, int) {}
void iris_hook_read(u64, void* value, u32 bytes) {
    for (u32 i = 0; i < bytes; ++i) static_cast<char*>(value)[i] = 0;
}
void iris_hook_write(u64, const void*, u32) {}
void* iris_hook_shared(u64 bytes) { return std::malloc(bytes); }
}

#include "iris/args.h"
#include IRIS_PLANT_FILE

int main() {
    const u64 symmetric = 1ull << 60, device = 2ull << 60;
    HeapView heap{};
    heap.size = 2;
    for (u32 rank = 0; rank < 2; ++rank) heap.signal[rank] = heap.data[rank] = symmetric;
    heap.device_words = device;
    Channel channel{};
    channel.size = 2;
    channel.tiles = 32;
    channel.flag_count = 1;
    const Record record{};
    const Launch launch{heap, channel, record, 0, 1, Trace(0, 0, 0, 0)};
    Workgroup wg(launch);
    bool ok = wg.enter();
    wg.push_signal(1, 0);
    wg.push_results(Members{2}, 0);
    ok &= wg.wait_tile(1, 0) && wg.wait_result(1, 0) && wg.locked(1, 0, [] {});
    ok &= wg.barrier(0, Members::all(2));
    wg.raise_flag(0);
    ok &= wg.wait_flag(0, 1);
    ok &= wg.finish(End::Pulled, ok);
    epoch::publish(wg.m, wg.m.signal(1, 0, 0), wg.call());
    OpArgs args{};
    args.heap = heap;
    args.channel = channel;
    const Matrix matrix{symmetric, 8, 8, 8, F32, 0};
    args.a = args.b = args.c = args.factors = matrix;
    args.list[0] = ListTensor{symmetric, 8, symmetric, 8, 8};
    args.m = args.n = args.k = args.tile_m = args.tile_n = args.k_group = 8;
    args.max_tiles = args.max_results = 4;
    args.sources = 2;
    args.counters = device + 4096;
    args.pulled = 1 << 20;
    IRIS_PLANT_ENTRIES
    if (!ok) std::printf("not through\n");
}

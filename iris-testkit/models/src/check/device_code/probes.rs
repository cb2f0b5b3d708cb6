//! Probes: kernels that make one access or one operation each, so that the compiled code can be
//! compared with the expected instructions.

use iris_sync::{Access, Order, Scope};

/// Operation of a probe on the word at byte 24 of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Load,
    Store,
    /// Accesses to the pair of 64-bit words at byte 16.
    LoadPair,
    StorePair,
    /// Accesses to the word of 128 bits in the same place.
    LoadQuad,
    StoreQuad,
    Rmw(Rmw),
    CompareExchange,
    Fence,
    /// Atomic addition to an f32.
    AddF32,
    /// Write of a fault record to the control block.
    KeepFault,
}

/// Read-modify-write operations, named as in port.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rmw {
    Add,
    Exchange,
    And,
    Or,
    Xor,
    Min,
    Max,
}

impl Rmw {
    const ALL: [Self; 7] =
        [Self::Add, Self::Exchange, Self::And, Self::Or, Self::Xor, Self::Min, Self::Max];

    /// Names of the operation in PTX, among NVIDIA's functions, and in LLVM IR.
    pub(super) fn names(self) -> [&'static str; 3] {
        match self {
            Self::Add => ["add.u", "fetch_add", "add"],
            Self::Exchange => ["exch.b", "exchange_n", "xchg"],
            Self::And => ["and.b", "fetch_and", "and"],
            Self::Or => ["or.b", "fetch_or", "or"],
            Self::Xor => ["xor.b", "fetch_xor", "xor"],
            Self::Min => ["min.s", "fetch_min", "min"],
            Self::Max => ["max.s", "fetch_max", "max"],
        }
    }
}

/// Kernel that makes one access, whose compiled instructions are then checked.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) order: Order,
    pub(super) scope: Scope,
    /// Whether the word has 64 bits.
    pub(super) wide: bool,
    /// Whether the word belongs to the device itself instead of to a peer.
    pub(super) own: bool,
    /// Statement that makes the access, in C++ with the device headers.
    statement: String,
}

const ORDERS: [Order; 4] = [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel];

/// Probes of every access of the protocols, and of every operation that the forms of port.h
/// implement.
pub(super) fn all() -> Vec<Probe> {
    let mut all: Vec<Probe> = Access::ALL.iter().map(|&access| of_access(access)).collect();
    let (relaxed, system) = (Order::Relaxed, Scope::System);
    for scope in [Scope::System, Scope::Device] {
        for wide in [false, true] {
            for (kind, order) in operations() {
                all.push(of_port(kind, order, scope, wide));
            }
        }
        for order in [Order::Acquire, Order::Release, Order::AcqRel] {
            all.push(of_port(Kind::Fence, order, scope, false));
        }
        all.push(of_port(Kind::AddF32, relaxed, scope, false));
    }
    let control = |name: &str, kind, order, statement: &str| Probe {
        name: name.into(),
        kind,
        order,
        scope: system,
        wide: false,
        own: false,
        statement: statement.into(),
    };
    all.push(control("host_abort", Kind::Load, relaxed, "*out = port::host_abort(at)"));
    let quad = "const LlQuad quad = m.load_quad<Access::LlLoad>(pair); \
                out[0] = quad.call; out[1] = static_cast<i32>(quad.data[0])";
    all.push(control("load_quad", Kind::LoadQuad, relaxed, quad));
    let quad = "m.store_quad<Access::LlStore>(pair, LlQuad{{1, 2, 3}, 4})";
    all.push(control("store_quad", Kind::StoreQuad, relaxed, quad));
    let keep = "const i32 fault[8] = {1, 2, 3, 4, 5, 6, 7, 8}; port::keep_fault(at, fault)";
    all.push(control("keep_fault", Kind::KeepFault, relaxed, keep));
    all
}

/// Additional probes for AMD compilers: every releasing operation at an address that the thread has
/// just loaded. Some compilers wait for that load and then omit the wait for the write-back.
pub(super) fn at_loaded_addresses() -> Vec<Probe> {
    let releases = |order: &Order| matches!(order, Order::Release | Order::AcqRel);
    let mut all = Vec::new();
    for scope in [Scope::System, Scope::Device] {
        let operations = operations().into_iter().filter(|(_, order)| releases(order));
        all.extend(operations.map(|(kind, order)| of_loaded_address(kind, order, scope)));
    }
    all
}

fn operations() -> Vec<(Kind, Order)> {
    let mut all = vec![
        (Kind::Load, Order::Relaxed),
        (Kind::Load, Order::Acquire),
        (Kind::Store, Order::Relaxed),
        (Kind::Store, Order::Release),
    ];
    for order in ORDERS {
        all.extend(Rmw::ALL.map(|rmw| (Kind::Rmw(rmw), order)));
        all.push((Kind::CompareExchange, order));
    }
    all
}

fn of_access(access: Access) -> Probe {
    let name = access.name();
    let own = access.scope() == Scope::Device;
    let (word, dev) = if own { ("dev", "dev_") } else { ("sym", "") };
    let (kind, statement) = match name {
        "LockTake" => (
            Kind::CompareExchange,
            format!("*out = m.compare_exchange<Access::{name}>({word}, 3, 4)"),
        ),
        "FinishAdd" => {
            (Kind::Rmw(Rmw::Add), format!("*out = m.{dev}add<Access::{name}>({word}, 3)"))
        }
        "LlLoad" => {
            let load = format!("LlWord words[2]; m.load_pair<Access::{name}>(pair, words)");
            let statement = format!("{load}; out[0] = words[0].call; out[1] = words[1].call");
            (Kind::LoadPair, statement)
        }
        "LlStore" | "LlStamp" => {
            let words = "LlWord{1, 2}, LlWord{3, 4}";
            (Kind::StorePair, format!("m.store_pair<Access::{name}>(pair, {words})"))
        }
        _ if name.ends_with("Load") => {
            (Kind::Load, format!("*out = m.{dev}load<Access::{name}>({word})"))
        }
        _ => (Kind::Store, format!("m.{dev}store<Access::{name}>({word}, 3)")),
    };
    let (order, scope) = (access.order(), access.scope());
    Probe { name: name.into(), kind, order, scope, wide: false, own, statement }
}

fn of_port(kind: Kind, order: Order, scope: Scope, wide: bool) -> Probe {
    let (word, to) = if wide { ("i64", "*out64") } else { ("i32", "*out") };
    let statement = match kind {
        Kind::Load => format!(
            "{to} = port::load<Order::{order:?}, Scope::{scope:?}>(at, static_cast<{word}*>(nullptr), -1)"
        ),
        Kind::Store => {
            format!("port::store<Order::{order:?}, Scope::{scope:?}>(at, {word}(3), -1)")
        }
        Kind::Rmw(rmw) => format!(
            "{to} = port::rmw<Rmw::{rmw:?}, Order::{order:?}, Scope::{scope:?}>(at, {word}(3), -1)"
        ),
        Kind::CompareExchange => format!(
            "{to} = port::compare_exchange<Order::{order:?}, Scope::{scope:?}>(at, {word}(3), {word}(4), -1)"
        ),
        Kind::Fence => format!("port::fence<Order::{order:?}, Scope::{scope:?}>()"),
        Kind::AddF32
        | Kind::KeepFault
        | Kind::LoadPair
        | Kind::StorePair
        | Kind::LoadQuad
        | Kind::StoreQuad => {
            format!("port::add_f32<Scope::{scope:?}>(at, 3.0f)")
        }
    };
    let what = match kind {
        Kind::Rmw(rmw) => format!("{rmw:?}"),
        kind => format!("{kind:?}"),
    };
    let name = format!("{what}_{order:?}_{scope:?}_{word}");
    Probe { name, kind, order, scope, wide, own: false, statement }
}

/// Probe of an operation at an address that the thread has just loaded.
fn of_loaded_address(kind: Kind, order: Order, scope: Scope) -> Probe {
    let probe = of_port(kind, order, scope, false);
    let loaded =
        "const u64 there = port::read<u64>(reinterpret_cast<u64>(out64) + port::thread() * 8) + 24";
    let statement = probe.statement.replace("(at,", "(there,");
    let name = format!("{}_loaded", probe.name);
    Probe { name, statement: format!("{loaded}; {statement}"), ..probe }
}

/// Start of a source file of probes: the include, and the parameters of a probe with the address of
/// its word.
pub(super) const FRAME: &str = "#include \"iris/sync.h\"\n\
    using namespace iris;\n\
    #define PROBE(name, ...) IRIS_KERNEL name(IRIS_ARGS HeapView heap, \\\n\
    IRIS_ARGS Channel channel, i32* out, i64* out64) { \\\n\
    const u64 at = heap.signal[1] + 24, own = heap.device_words + 24; \\\n\
    (void)at, (void)own, (void)out, (void)out64; __VA_ARGS__; }\n";

/// Source text of the kernels of all probes.
pub(super) fn source(probes: &[Probe]) -> String {
    let mut text = FRAME.to_string();
    for Probe { name, statement, .. } in probes {
        text += &format!(
            "PROBE(probe_{name}, const Words m{{heap, channel}}; \
             const SymWord sym = heap.word(1, 6); const DevWord dev = heap.device_word(6); \
             const SymPair pair = heap.pair(1, 4); \
             (void)m, (void)sym, (void)dev, (void)pair; {statement})\n"
        );
    }
    text
}

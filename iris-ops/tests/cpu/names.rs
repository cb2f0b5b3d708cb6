//! Tests of names: names of two crates that a program glob-imports, and names of variants in text.

use iris_heap::*;
use iris_ops::*;
use iris_testkit::error_texts::fails;

/// Makes a plan by names from both crates. Each crate has an error, a result and a request, and
/// their names must not clash.
fn planned(world: &World) -> OpResult<Plan> {
    let request: OpRequest = Op::AllReduce.request(3, 4, 0);
    let plan: Result<Plan, OpError> = request.plan(world);
    plan
}

#[test]
fn both_crates_can_be_imported_whole() {
    let rank = |world: World| -> Result<usize> {
        let plan = planned(&world).map_err(Error::other)?;
        let _: Option<Request> = None;
        world.close()?;
        Ok(plan.request().m)
    };
    assert_eq!(World::run_threads(2, rank).unwrap(), [3, 3]);
}

/// Checks that an operator's own `Variant` parses the same names as the common `Variant`.
macro_rules! same_variants {
    ($($module:ident: $op:ident),*) => {$(
        for kind in Op::$op.variants() {
            for name in [kind.name().to_owned(), kind.name().replace('_', "-")] {
                let own: $module::Variant = name.parse().unwrap();
                assert!(own == kind && kind == own && own.kind() == Some(kind), "{name}");
                assert!(own != $module::Variant::Auto, "{name}");
                assert_eq!(Op::$op.variant(&name).unwrap(), Some(kind));
                assert_eq!(name.parse::<Variant>().unwrap(), kind);
            }
        }
        let auto: $module::Variant = "auto".parse().unwrap();
        assert_eq!((auto.kind(), Op::$op.variant("auto").unwrap()), (None, None));
        let [own, all] =
            ["ring".parse::<$module::Variant>().map(|it| it.kind()), Op::$op.variant("ring")];
        assert_eq!(own.unwrap_err().to_string(), all.unwrap_err().to_string());
    )*};
}

#[test]
fn variants_of_an_operator_are_those_of_all() {
    same_variants!(
        matmul_all_reduce: MatmulAllReduce,
        matmul_reduce_scatter: MatmulReduceScatter,
        all_gather_matmul: AllGatherMatmul,
        matmul_all_gather: MatmulAllGather,
        all_reduce: AllReduce,
        all_gather: AllGather,
        reduce_scatter: ReduceScatter,
        all_to_all: AllToAll,
        broadcast: Broadcast
    );
    let own = all_gather_matmul::Variant::Staged(Staged::new().fetchers(3));
    assert_eq!(own, Variant::Staged);
    fails(
        "push".parse::<all_gather_matmul::Variant>(),
        &["variant is push, expected auto, baseline, pull, staged"],
    );
}

#[test]
fn parts_are_counted_by_usize() {
    let parts: Vec<_> = (0..3).map(|rank: usize| split(10_usize, 3, rank)).collect();
    assert_eq!(parts, [0..4, 4..7, 7..10]);
}

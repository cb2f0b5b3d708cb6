use iris_testkit::model::*;
#[test]
fn probe() {
    let acc = |atomic| ops::Accumulate { atomic, first_barrier: true, second_barrier: true };
    let b: Option<usize> = std::env::var("B").ok().map(|b| b.parse().unwrap());
    let n: u32 = std::env::var("N").map_or(1, |b| b.parse().unwrap());
    let filter = std::env::var("F").unwrap_or_default();
    for s in [
        ops::one_shot(2, 1, n),
        ops::two_shot(2, 1, n, false),
        ops::two_shot(2, 1, n, true),
        ops::two_shot(2, 2, n, false),
        ops::reduce_scatter(2, 1, n),
        ops::deliver(2, 1, n, true, false),
        ops::deliver(2, 1, n, true, true),
        ops::deliver(2, 1, n, false, false),
        ops::deliver(2, 1, n, false, true),
        ops::pull(2, 1, n),
        ops::staged(&[2], 1, n),
        ops::staged(&[1,1], 1, n),
        ops::staged(&[2,1], 1, n),
        ops::staged(&[2,2], 1, n),
        ops::gather(2, 1, n, true),
        ops::accumulate(2, 1, n, acc(false)),
        ops::accumulate(2, 1, n, acc(true)),
    ] {
        if !s.name().contains(&filter) { continue }
        let r = loom_memory::check(&s, &Rules::default(), b);
        println!("{r}");

        if s.name().contains("one_shot") && n == 1 {
            println!("2 lanes {}", loom_memory::check(&s.clone().lanes(2), &Rules::default(), b));
            println!("2 groups {}", loom_memory::check(&s.groups(&[2,2]), &Rules::default(), b));
        }
    }
}

use iris_testkit::model::*;
#[test]
fn probe() {
    let acc = |atomic| ops::Accumulate { atomic, first_barrier: true, second_barrier: true };
    let n: u32 = std::env::var("N").map_or(1, |b| b.parse().unwrap());
    let w: u32 = std::env::var("W").map_or(2, |b| b.parse().unwrap());
    let filter = std::env::var("F").unwrap_or_default();
    for s in [
        ops::one_shot(w, 1, n),
        ops::two_shot(w, 1, n, false),
        ops::two_shot(w, 1, n, true),
        ops::two_shot(w, 2, n, false),
        ops::reduce_scatter(w, 1, n),
        ops::deliver(w, 1, n, true, false),
        ops::deliver(w, 1, n, true, true),
        ops::deliver(w, 1, n, false, false),
        ops::deliver(w, 1, n, false, true),
        ops::pull(w, 1, n),
        ops::staged(&vec![1;w as usize], 1, n),
        ops::staged(&vec![2;w as usize], 1, n),
        ops::gather(w, 1, n, true),
        ops::accumulate(w, 1, n, acc(false)),
        ops::accumulate(w, 1, n, acc(true)),
    ] {
        if !s.name().contains(&filter) { continue }
        let r = search::random(&s, &Rules::default(), 1, 2000);
        println!("{r}");
        let r = search::exhaust(&s, &Rules::default(), 5_000_000);
        println!("{r}");
        if n == 1 && s.name().contains("one_shot") {
            println!("2 lanes {}", search::random(&s.clone().lanes(2), &Rules::default(), 1, 1000));
            println!("2 groups {}", search::random(&s.clone().groups(&vec![2; w as usize]), &Rules::default(), 1, 1000));
        }
    }
}

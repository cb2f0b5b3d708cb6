//! Tests that PROTOCOL.md names every clause of the proof once, and no clause that does not exist.

use iris_models::check::protocol::Pointers;

#[test]
fn every_clause_has_its_section_and_every_pointer_its_clause() {
    let pointers = Pointers::of_iris_sync().unwrap();
    assert_eq!(pointers.faults(), Vec::<String>::new());
    assert_eq!(pointers.sections["pass: the member's word was seen"], "The device barrier");
}

#[test]
fn a_pointer_that_is_missing_or_leads_nowhere_is_named() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../iris-sync/PROTOCOL.md");
    let text = std::fs::read_to_string(path).unwrap();
    let faults = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Pointers::read(&text.replacen(from, to, 1)).faults()
    };
    let missing = "PROTOCOL.md: no section names the clause \"enter: once a call\"";
    let unknown = "PROTOCOL.md: section \"Entry and credit: the slot rule\" names \"enter: twice\", \
                   which is no clause";
    assert_eq!(faults("`enter: once a call`", "`enter: twice`"), [missing, unknown]);
    assert_eq!(faults("`enter: once a call`", ""), [missing]);
    let twice = "PROTOCOL.md: the clause \"enter: once a call\" is named twice";
    assert_eq!(faults("*Proved* (1):", "*Proved* (1): `enter: once a call`,"), [twice]);
}

//! Documents for property tests: good ones in which any one value is another one.

use proptest::prelude::*;
use serde_json::{Value, json};

/// Good JSON in which one value is gone or of another kind or size.
pub(crate) fn changed(good: &str) -> impl Strategy<Value = String> + use<> {
    let good: Value = serde_json::from_str(good).expect("the good document is JSON");
    let values = vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("\u{0}/../\u{202e}"),
        json!("sha256:00"),
        json!([]),
        json!([null]),
        json!({}),
        json!({ "": [[]] }),
    ];
    (0..count(&good), prop::sample::select(values)).prop_map(move |(mut at, value)| {
        let mut document = good.clone();
        replace(&mut document, &mut at, &value);
        document.to_string()
    })
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(count).sum(),
        Value::Object(values) => values.values().map(count).sum(),
        _ => 0,
    }
}

/// Replaces the value with this number, counted from the root down; says whether it was here.
fn replace(value: &mut Value, at: &mut usize, by: &Value) -> bool {
    if *at == 0 {
        *value = by.clone();
        return true;
    }
    *at -= 1;
    match value {
        Value::Array(values) => values.iter_mut().any(|value| replace(value, at, by)),
        Value::Object(values) => values.values_mut().any(|value| replace(value, at, by)),
        _ => false,
    }
}

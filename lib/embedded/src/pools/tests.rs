use std::fs;

use super::*;
use crate::fixture::Engine;

fn record(engine: &Engine, name: &str) -> Record {
    let snapshot = engine.snapshot();
    Record { name: name.parse().unwrap(), template: "template".into(), snapshot, size: 1 }
}

async fn open(engine: &Engine) -> Pools {
    Pools::open(&engine.layout, engine.runtime.clone(), engine.under_way.clone()).await.unwrap()
}

fn names(pools: &Pools) -> Vec<String> {
    pools.list().into_iter().map(|pool| pool.name).collect()
}

#[tokio::test]
async fn a_pool_whose_record_cannot_be_removed_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::open(folder.path()).await;
    let pools = open(&engine).await;
    pools.create(record(&engine, "warm")).await.unwrap();
    assert_eq!(engine.runtime.keepers().await.unwrap(), ["pool-warm".to_owned()].into());
    let path = engine.layout.pools().join("warm.json");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(pools.remove("warm").await, Err(Error::Record(_))));
    assert_eq!(names(&pools), ["warm"]);
    fs::remove_dir(&path).unwrap();
    pools.remove("warm").await.unwrap();
    assert!(!pools.is_any());
    assert!(engine.runtime.keepers().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_pool_that_cannot_be_written_down_is_none_and_keeps_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::open(folder.path()).await;
    let pools = open(&engine).await;
    fs::create_dir_all(engine.layout.pools().join("warm.new")).unwrap();
    assert!(matches!(pools.create(record(&engine, "warm")).await, Err(Error::Record(_))));
    assert!(!pools.is_any());
    assert!(engine.runtime.keepers().await.unwrap().is_empty());
}

#[tokio::test]
async fn what_a_pool_kept_that_is_gone_is_let_go_by_the_next_owner() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::open(folder.path()).await;
    open(&engine).await.create(record(&engine, "warm")).await.unwrap();
    for by in ["pool-gone", "somebody"] {
        engine.runtime.keep(&engine.snapshot(), by).await.unwrap();
    }
    assert_eq!(names(&open(&engine).await), ["warm"]);
    let kept = ["pool-warm", "somebody"].map(str::to_owned);
    assert_eq!(engine.runtime.keepers().await.unwrap(), kept.into());
}

#[test]
fn a_vm_that_nobody_has_taken_leaves_nothing_behind() {
    let pool: PoolName = "warm".parse().unwrap();
    assert_eq!(child(&pool).when_stopped, WhenStopped::Remove);
    assert_eq!(claimed(&pool, Claim::default()).when_stopped, WhenStopped::Keep);
}

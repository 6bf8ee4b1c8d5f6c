//! Settings as JSON, byte by byte: refused, or read as what they are written as.
#![no_main]

use libfuzzer_sys::fuzz_target;
use multipack::{Config, Error};

fuzz_target!(|text: &str| {
    match Config::from_json(text) {
        Ok(config) => {
            let again = Config::from_json(&config.to_json()).expect("what was written is right");
            assert_eq!(config, again);
            let short = Config::from_json(&config.to_short_json()).expect("so is what differs");
            assert_eq!(config, short);
        }
        Err(Error::Internal { message }) => panic!("{message}"),
        Err(error) => assert!(error.to_string().len() < 2000, "{error}"),
    }
});

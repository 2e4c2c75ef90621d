// The memory layout shared with the host: what kernels/abi.py says, word by word. A test compares the two.
#pragma once

#include "common.cuh"

// Words of a slot.
constexpr int SLOT_SEQ_LEN = 0, SLOT_LAST_TOKEN = 1, SLOT_MAX_LEN = 2, SLOT_STATE = 3, SLOT_SERIAL = 4;
constexpr int SLOT_TEMPERATURE = 5, SLOT_TOP_K = 6, SLOT_TOP_P = 7, SLOT_MIN_P = 8, SLOT_SEED_LO = 9, SLOT_SEED_HI = 10;
constexpr int SLOT_REPETITION_PENALTY = 11, SLOT_PRESENCE_PENALTY = 12, SLOT_FREQUENCY_PENALTY = 13;
constexpr int SLOT_NUM_STOP_IDS = 14, SLOT_STOP_IDS = 15, SLOT_MIN_LEN = 23, SLOT_PROMPT_LEN = 24;
constexpr int SLOT_NUM_BIAS = 25, SLOT_NUM_LOGPROBS = 26, SLOT_FRESH = 27;
constexpr int SLOT_WORDS = 32;

constexpr int MAX_STOP_IDS = 8, MAX_BIAS = 300, MAX_LOGPROBS = 20;

constexpr int STATE_RUNNING = 1, STATE_DONE = 2;           // SlotState
constexpr int FLAG_GOES_ON = 0, FLAG_STOP = 1, FLAG_LENGTH = 2;  // TokenFlag

constexpr int FIELDS = 11;  // what a patch may write
constexpr int PATCH_HEADER = 3, RECORD_HEADER = 2, TOKEN_WORDS = 4;
constexpr int LOGPROB_WORDS = 2 + 2 * MAX_LOGPROBS;

// Words of `control`.
constexpr int CONTROL_STEP = 0;   // steps done
constexpr int CONTROL_ERROR = 1;  // not 0: a step started without its delta record
constexpr int CONTROL_FOUND = 2;  // the step number that it found instead

#include "ds4_help.h"

#include <stddef.h>

const char *const ds4_help_cli[] = {
"usage: ds4 [options]                          a chat, when standard input is a terminal\n"
"       ds4 [options] -p TEXT                  one answer\n"
"       ds4 [options] < FILE                   one answer; the whole of standard input is the prompt\n"
"\n"
"Runs DeepSeek-V4 models from GGUF files. With an MTP head it drafts tokens ahead and verifies them in one pass; greedy\n"
"text with a head is bit for bit the text without it. Long options are written --name VALUE or --name=VALUE (the second\n"
"form also takes a value that looks like an option). Defaults stand in (parentheses).\n",

"\nModel\n"
"  -m, --model FILE       target GGUF; any part of a split file will do\n"
"                         ($DS4_MODEL, else ./ds4flash.gguf, else the small model that comes with ds4, without its head)\n"
"  -c, --ctx N            most tokens of a session, 1 to 16777216 (the model's own context, at most 32768)\n"
"  -t, --threads N        threads, 1 to 256 (the processors this process may use, by its affinity and its container's quota)\n"
"      --kv-type TYPE     rows of the attention caches: f32, f16 or fp8 (f16)\n"
"      --prefill-chunk N  most tokens of one pass over a prompt, 1 to 4096 (256); any value gives the same bits\n"
"      --max-rewind N     tokens a session can go back, 0 to 16777216 (64); costs memory. A chat that goes back further, past\n"
"                         long reasoning, say, evaluates its text again.\n"
"      --isa NAME         kernels: auto, scalar, avx2, avxvnni, avx512, amx or neon (auto); all give the same bits\n"
"      --mlock            lock the weights in memory (off)\n"
"      --backend NAME     cpu (cpu)\n",

"\nSpeculation (trades speed only, never the text)\n"
"      --mtp FILE         head GGUF for the target, in ds4's or llama.cpp's layout (none)\n"
"      --glm-mtp          use the head inside the target's own file (off)\n"
"      --mtp-draft N      tokens drafted ahead each cycle, 0 to 16, or auto: as many as pay by what this machine's passes take\n"
"                         and how often drafts were right, none included (auto)\n"
"      --draft-lookup N   draft what followed the last time that the last N tokens, or fewer but at least 2, occurred (with\n"
"                         1: the last one); with and without a head; 0 to 64 (0: off). For texts that repeat themselves,\n"
"                         or the prompt.\n"
"      --mtp-margin F     lead in logits, 0 to 1000, that a drafted token needs over the runner-up to be taken from the\n"
"                         batch (0: every match, with --mtp-draft auto; 3.0 with a number). For greedy text; sampled\n"
"                         drafts need no margin.\n"
"      --mtp-shortlist N  draft from the vocabulary's first N tokens and those of the text (32768); 0: from all. A short list\n"
"                         makes drafting cheaper and misses a rare word now and then.\n"
"      --mtp-sampling NAME  how drafts are judged with --temp above 0: coupled (coupled), a seed's text is then the text\n"
"                         without a head; or rejection, the same law, but a seed's text depends on the depth\n",

"\nPrompt (at most one of -p, --prompt-file and --prompt-ids)\n"
"  -p, --prompt TEXT      the prompt: a user turn if the model has a chat template, plain text if it has none\n"
"      --prompt-file FILE the same from a file, - for standard input; one newline at its end is dropped\n"
"      --prompt-ids FILE  token ids with white space between them, - for standard input; nothing is added\n"
"      --raw-prompt       no chat template: BOS and the text (off)\n"
"      --rendered         the text is rendered already: control tokens in it are parsed, BOS is added if missing (off)\n"
"  -sys, --system TEXT    system text, before the first turn (none)\n"
"      --think            let the model reason before it answers (off)\n"
"      --think-max        the same with the template's maximum-effort paragraph (off)\n"
"      --nothink          answer directly (on)\n"
"      --session FILE     go on from a saved session if FILE is there, save it there at the end (none). A prompt that begins\n"
"                         with all the session's tokens is evaluated from there on; any other continues the session: as a\n"
"                         further user turn, or as further text without a chat template. An empty prompt adds nothing.\n",

"\nGeneration\n"
"  -n, --tokens N         most tokens of an answer, 0 to 16777216, or -1: as many as the context holds (-1 if the model has\n"
"                         a chat template and so ends its answers itself, 512 if it has none)\n"
"      --temp F           temperature, 0 to 100 (0: greedy, always the most likely token)\n"
"      --top-k N          keep the N most likely tokens, 0 to 16777216 (0: all)\n"
"      --top-p F          keep the most likely tokens until their sum is F, 0 to 1 (1: all)\n"
"      --min-p F          keep tokens at least F times as likely as the first, 0 to 1 (0: all)\n"
"      --presence-penalty F   taken off the logit of each token that the answer holds, -100 to 100 (0)\n"
"      --frequency-penalty F  taken off it for each time that the answer holds it, -100 to 100 (0)\n"
"      --logit-bias ID:F  added to the logit of token ID, -1000 to 1000, or -inf to forbid it; may be given many times (none)\n"
"      --seed N           same seed, same text, 0 to 18446744073709551615 (0)\n"
"      --stop TEXT        end the answer before TEXT, wherever tokens divide it; may be given many times (none)\n"
"      --ignore-eos       go on after the end-of-text token, which is not printed (off)\n",

"\nOutput\n"
"      --print-ids        the generated token ids on standard output, one a line, and nothing else (off)\n"
"      --stats            speed, weights read, drafted and accepted tokens by position, time by phase, on standard error (off)\n"
"      --stats-json FILE  the same as JSON, and what ds4.h's ds4_work counts (none)\n"
"      --dump-logprobs FILE      a JSON line for each generated token: position, id, logprob, the five most likely (none)\n"
"      --dump-logits FILE.npy    logits of every prompt token, float32 [tokens, vocabulary]; then ends, unless -n is given\n"
"      --dump-head-logits FILE.npy  the head's, float32 [tokens - 1, vocabulary]: row q guesses token q + 2; likewise\n"
"      --dump-tokens      the prompt's token ids and their text, then ends\n"
"      --perplexity-file FILE    nats a token and perplexity of a text, then ends. A text longer than --ctx tokens is read in\n"
"                         windows of that length, each starting in the middle of the one before; a token is scored in\n"
"                         the first window it is in. With a head also how often its first draft is the target's choice\n"
"      --bench            measures: prompt and generation speed, passes by their rows, a head step, how many drafts must be\n"
"                         right to pay; with a head or --draft-lookup, depths and, for greedy text, margins behind the\n"
"                         prompt (-p and so on, or a text of its own), -n tokens each (64), end-of-text ignored. Then\n"
"                         ends.\n"
"      --bench-ctx LIST   the contexts to measure at, ascending (0,512,2048, those that fit)\n"
"      --bench-runs N     how often each is measured, 1 to 99; medians count (3)\n"
"      --csv FILE         the figures of --bench, one a line (none)\n"
"      --json FILE        the same as JSON (none)\n"
"      --inspect          sizes, types, and the memory that the model, head and a session (-c) need, then ends\n"
"      --inspect-tensors  the same and every tensor\n"
"  -q, --quiet            no notes and no progress bars (off); errors and warnings remain\n"
"  -h, --help             this text\n"
"      --version          the version\n",

"\nEnvironment\n"
"  DS4_MODEL              the model when -m is not given\n"
"  DS4_MTP_MIN_MARGIN     overrides --mtp-margin\n"
"  DS4_MTP_CONF_LOG       1: a line for each drafted token on standard error: position, ids, leads, margin, verdict (0)\n",

"\nExit status: 0 done, 1 something failed, 2 misuse, 130 stopped by Ctrl+C. Failures are one line on standard error.\n"
"A file that is written takes its place when it is whole: a run that fails or is ended leaves what was there.\n"
"Bytes that are no UTF-8 are printed as U+FFFD; a character that several tokens make is printed when it is whole.\n",

"\nExamples\n"
"  ds4 -m target.gguf --mtp head.gguf --mtp-draft 2 --mtp-margin 3.0\n"
"  ds4 -m target.gguf --mtp head.gguf --mtp-draft 2 -p \"Why is the sky blue?\" --stats\n"
"  ds4 -m target.gguf -p \"A haiku about rain.\" --temp 0.8 --top-p 0.95 --seed 7\n"
"  ds4 -m target.gguf --draft-lookup 8 --prompt-file code.txt\n"
"  ds4 -m target.gguf --session talk.ds4 -p \"And now?\"\n"
"  ds4 -m target.gguf --prompt-ids ids.txt --print-ids -n 64\n"
"  ds4 -m target.gguf --mtp head.gguf --bench --json bench.json\n"
"  ds4 -m target.gguf --mtp head.gguf --inspect\n",
NULL };

const char ds4_help_chat[] =
"/think        reason before answering, from the next message on\n"
"/nothink      answer directly\n"
"/ctx          how much of the context is used\n"
"/stats        speed and speculation of the last answer\n"
"/read FILE    send a file's text as a message\n"
"/new          forget the chat and start over\n"
"/quit         leave (so does Ctrl+D on an empty line)\n"
"Ctrl+C stops an answer, or clears the line. Alt+Enter starts a new line. Arrows move in the line and in the history,\n"
"Ctrl+A and Ctrl+E go to its ends, Ctrl+K, Ctrl+U and Ctrl+W delete, Ctrl+L clears the screen. A message that begins\n"
"with / is sent with a space before it.\n";

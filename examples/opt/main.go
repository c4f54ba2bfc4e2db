// Command opt continues texts with an OPT model, decoded by Gorgonia with
// leanattention as the attention operator.
//
//	go run gorgonia.org/leanattention/examples/opt -prompt "Once upon a time"
//	echo "Once upon a time" | opt -prompt - -json -logprobs 3
//	opt -i
//	opt -perplexity book.txt
//
// The text goes to standard output as it grows, everything else to standard
// error. Several prompts are one batch and are continued together; their texts
// are written one after the other. Without -model the command decodes a small
// model that is part of the program; -model opens a Hugging Face folder of any OPT.
//
// A text ends at the model's end of text, before a -stop text, after -n tokens,
// at the model's last position, or at Ctrl-C. The possible beginning of a stop
// text is held back until it is certain.
//
// With -json standard output is one JSON document instead, written at the end:
//
//	{
//	  "model": "the shipped model",         the folder, as -model has it
//	  "device": "cpu",                      or the GPU
//	  "texts": [{                           of each prompt
//	    "prompt": "Once",
//	    "prompt_tokens": [2, 680],
//	    "cached_tokens": 0,                 of these, what -prompt-cache had
//	    "shared_tokens": 0,                 of these, what was read for a text before
//	    "text": " upon",                    without the stop text
//	    "tokens": [531],                    as chosen: the stop text's too, the end of text not
//	    "reason": "length",                 or "eos", "stop", "interrupt", or "context": the model has no position left
//	    "context": 2048,                    with that reason, the model's positions
//	    "logprobs": [{                      with -logprobs, of each token
//	      "token": 531, "text": " upon", "logprob": -0.01,
//	      "top": [{"token": 531, "text": " upon", "logprob": -0.01}]
//	    }]
//	  }],
//	  "perplexity": {                       with -perplexity, in place of texts
//	    "value": 1.6788, "tokens": 4981, "of": 4984, "windows": 3,
//	    "window": 2048, "stride": 2048, "complete": true
//	  },
//	  "stats": {                            times in seconds
//	    "seed": 17,                         only where tokens are drawn
//	    "load": 0.02, "build": 0.01, "first": 0.02,
//	    "prefill": {"tokens": 2, "runs": 1, "seconds": 0.01, "tokens_per_second": 200, "attention": 0.001, "bytes": 7000000},
//	    "decode": {...},                    the same
//	    "draft": {"tokens": 40, "accepted": 21, "runs": 8},   with -draft
//	    "exchange": {"sums": 64, "bytes": 16384, "seconds": 0.0002}    of several GPUs or ranks, in a run of decode
//	  }
//	}
//
// A log-probability is the natural logarithm of softmax of the logits, whatever
// -temperature, -top-k and -top-p make of it.
//
// -perplexity cuts a text into windows of the model's positions, side by side or
// -stride tokens apart, and tells exp of the mean of -log p over all tokens that have
// one before them in their window; each token is counted once. It is what
// transformers' page on the perplexity of models of a fixed length computes.
//
// -prompt-cache keeps the keys and values of a prompt in a file. A later run takes
// the beginning of its prompt from the file, and computes the rest. The file names
// its model, weights and type of cache; a file that does not fit is an error, and
// stays as it is. If the name is a link, the target of the link is written.
//
// A common beginning of several prompts, of 16 tokens or more, is read once, and its keys and
// values are shared. -n-samples makes several texts of each prompt: text j of prompt i is drawn
// with the seed's stream of random numbers (i-1)*n+j-1, as for prompts given one by one, i and j from 1.
//
// -draft ngram is speculative decoding with drafts from the text itself (prompt lookup
// decoding): the last tokens are looked up in the text so far, the tokens after them there
// are read at once, and kept as far as the model chooses the same. The tokens are those of
// decoding without drafts, also of sampled texts: each is drawn from the model's own
// distribution, with the same random number. While prompts are read there are no drafts.
//
// -i is a session on a terminal. A line is appended to the text and continued; keys
// and values of earlier tokens stay in the cache. /undo takes a line back,
// /fork and /back keep a text and return to it, Ctrl-C ends a text and Ctrl-D the
// session.
//
// If RANK and WORLD_SIZE are set, as torchrun sets them, the process is one of several that
// compute a model together, each with a part of the weights and of the cache on its GPU
// (-device gpu), or on several (-device gpu:0,1): see docs/devices.md. All ranks get the same model, texts and flags; only -device,
// -stats, -json and the paths of files may differ. Any other difference is an error of all ranks, with the difference. Rank 0
// writes the texts; the others write only errors.
//
// Exit status: 0; 1 if something could not be read, computed or written; 2 for
// wrong flags; 130 after an interrupt, when what was decoded has been written.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	exitError       = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	// The first interrupt ends the text, a second one the process.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run runs the command and returns the exit status.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	err := do(ctx, args, stdin, stdout, stderr)
	var wrong usageError
	switch {
	case err == nil, errors.Is(err, errHelp):
		return 0
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "opt: %s; opt -h lists the flags\n", printable(err.Error()))
		return exitUsage
	}
	fmt.Fprintf(stderr, "opt: %s\n", printable(err.Error()))
	return exitError
}

// printable escapes characters that control or are invisible on a terminal, as in Go's strings: an error may contain
// text of a file or of another process.
func printable(message string) string {
	var b strings.Builder
	for len(message) > 0 {
		r, size := utf8.DecodeRuneInString(message)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, message[0])
		case r == '\n' || r == '\t' || strconv.IsGraphic(r):
			b.WriteString(message[:size])
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		message = message[size:]
	}
	return b.String()
}

func do(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	defer limitMemory()()
	if o.world.Rank > 0 { // rank 0 writes progress; all ranks write errors
		stdout, stderr = io.Discard, io.Discard
	}
	in := interruptible{ctx, stdin}
	if err := o.readPrompts(in); err != nil {
		return err
	}
	switch {
	case o.perplexity != "":
		if o.text, err = readBounded(o.perplexity, in, maxText); err != nil {
			return fmt.Errorf("-perplexity: %w", err)
		}
		return tellPerplexity(ctx, o, stdout, stderr)
	case o.interactive:
		return converse(ctx, o, stdin, stdout, stderr)
	}
	return generate(ctx, o, stdout, stderr)
}

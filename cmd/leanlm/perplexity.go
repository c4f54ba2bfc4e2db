package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// A text is cut into windows of -c tokens, -stride tokens apart; the last window ends with the text. In each window the model
// predicts the tokens that no earlier window has, except the first token of the window. The perplexity is
//
//	exp(-1/n * sum over these n tokens of log p(token | those before it in its window))
//
// transformers' page on the perplexity of models of a fixed length computes the same. Its sliding windows weigh their means by one
// token too few. Here each token has the same weight.
//
// With -half the windows and their tokens are those of llama.cpp's perplexity: full windows side by side, of which the tokens after
// the one in the middle are predicted. If the tokenizer begins each text with a token, each window begins with that token in place of
// its own first one.

// window is tokens begin to end of a text, of which those from first on are predicted.
type window struct{ begin, first, end int }

// windows cuts a text.
func windows(tokens, size, stride int) (all []window) {
	for begin, seen := 0, 0; seen < tokens; begin += stride {
		end := min(begin+size, tokens)
		if first := max(seen, begin+1); first < end {
			all = append(all, window{begin, first, end})
		}
		seen = end
	}
	return all
}

// halves cuts a text into windows for -half.
func halves(tokens, size int) (all []window) {
	for end := size; end <= tokens; end += size {
		if first := end - size + size/2 + 1; first < end {
			all = append(all, window{end - size, first, end})
		}
	}
	return all
}

// perplexityJSON is what -json writes.
type perplexityJSON struct {
	Model    string  `json:"model"`      // -m; "" is the shipped model
	Value    float64 `json:"perplexity"` // at most the largest float64
	Tokens   int     `json:"tokens"`     // that were predicted
	Of       int     `json:"of"`         // tokens of the text
	Windows  int     `json:"windows"`    // that were read
	Window   int     `json:"window"`
	Stride   int     `json:"stride"`
	Half     bool    `json:"half,omitempty"`
	Complete bool    `json:"complete"` // false: interrupted
}

// perplexity tells how well a model predicts a text.
func perplexity(ctx context.Context, args []string, std streams) (err error) {
	var m modelFlags
	var file string
	var stride, chunks int
	var half, asJSON bool
	f := newFlags("perplexity", "perplexity tells how well a model predicts a text: exp of the mean of -log p over its tokens, in windows of -c tokens.")
	m.add(f)
	f.text(&file, "f,file", "", "`file` with the text; - is standard input")
	f.integer(&stride, "stride,ppl-stride", 0, "`tokens` from one window to the next; a token is predicted once, in the first window that has it; 0: windows side by side, whose first token is not predicted")
	f.is(&half, "half", "windows and tokens of llama.cpp's perplexity: full windows side by side, and the second half of each is predicted; llama.cpp's -c is 512 if it is not given")
	f.integer(&chunks, "chunks", 0, "most `windows` to read; 0: all")
	f.is(&asJSON, "json", "write a JSON document")
	if err := f.parse(args, std); err != nil {
		return err
	}
	switch {
	case file == "":
		return usagef("no text: give a file with -f")
	case stride < 0:
		return usagef("-stride is %d, less than 0", stride)
	case stride > 0 && half:
		return usagef("-stride is for windows that overlap, and those of -half are side by side")
	case chunks < 0:
		return usagef("-chunks is %d, less than 0", chunks)
	}
	text, err := readText(file, std.in)
	if err != nil {
		return fmt.Errorf("-f: %w", err)
	}
	model, err := m.open()
	if err != nil {
		return err
	}
	defer func() { err = model.end(err) }()
	interrupted := ctx
	if ctx, std, err = m.join(ctx, model, together{f, map[string]string{"text of -f": text}}, std); err != nil {
		return err
	}
	ids, err := model.Tokenizer().Encode(text, tokenizer.Options{})
	if err != nil {
		return fmt.Errorf("-f: %w", err)
	}
	if len(ids) < 2 {
		return fmt.Errorf("-f: the text has %d tokens; a perplexity needs 2", len(ids))
	}
	m.options.Batch = 1
	engine, err := m.engine(model, std)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	r := perplexityJSON{Model: m.path, Of: len(ids), Window: engine.Options().Context, Stride: stride, Complete: true}
	switch {
	case stride == 0:
		r.Stride = r.Window
	case stride > r.Window:
		return usagef("-stride is %d, more than the %d tokens of a window: no window would have the tokens between", stride, r.Window)
	}
	all := windows(len(ids), r.Window, r.Stride)
	begin := -1 // token that begins each window; -1: its own
	if r.Half = half; half {
		if len(ids) < r.Window {
			return fmt.Errorf("-f: the text has %d tokens, and -half needs the %d of a window: give a longer text, or a smaller -c", len(ids), r.Window)
		}
		all = halves(len(ids), r.Window)
		if none, err := model.Tokenizer().Encode("", tokenizer.Options{}); err == nil && len(none) > 0 && none[0] == model.Tokenizer().BOS() {
			begin = none[0]
		}
	}
	if chunks > 0 {
		all = all[:min(chunks, len(all))]
	}
	if len(all) == 0 {
		if half {
			return fmt.Errorf("-c is %d, and -half needs 3: no token is in the second half of a window after its first token", r.Window)
		}
		return fmt.Errorf("-c is %d: no token has another one before it", r.Window)
	}
	live := isTerminal(std.err)
	sum := 0.0
	for _, w := range all {
		tokens := slices.Clone(ids[w.begin:w.end])
		if begin >= 0 {
			tokens[0] = begin
		}
		p, err := engine.LogProbs(ctx, tokens)
		if err != nil && (r.Windows == 0 || !errors.Is(err, context.Canceled)) {
			return m.hint(err)
		} else if err != nil {
			r.Complete = false
			break
		}
		for _, x := range p[w.first-w.begin-1:] {
			sum, r.Tokens = sum-x, r.Tokens+1
		}
		if r.Windows++; live {
			fmt.Fprintf(std.err, "\r%d of %d windows", r.Windows, len(all))
		}
	}
	if live {
		fmt.Fprint(std.err, "\r\x1b[K")
	}
	r.Value = min(math.Exp(sum/float64(r.Tokens)), math.MaxFloat64)
	return errors.Join(r.write(asJSON, std), interrupted.Err())
}

func (r *perplexityJSON) write(asJSON bool, std streams) error {
	if asJSON {
		data, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		return write(std, string(data), "\n")
	}
	state := ""
	if !r.Complete {
		state = ", interrupted"
	}
	return write(std, fmt.Sprintf("perplexity %.6f of %d of %d tokens, in %d windows of up to %d%s\n", r.Value, r.Tokens, r.Of, r.Windows, r.Window, state))
}

// Command opt continues texts with an OPT model, by a graph that is written by hand: docs/decoder.md explains it step by step.
//
//	go run ./examples/opt -prompt "Once upon a time" -prompt "The miller" -temperature 0.8
//
// The program is short enough to be copied. Command leanlm runs all models of package decoder, also on GPUs.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
)

func main() {
	var prompts []string
	flag.Func("prompt", "`text` to continue; may be given several times", func(s string) error {
		prompts = append(prompts, s)
		return nil
	})
	dir := flag.String("model", "", "`folder` of the model; without it, a small model")
	most := flag.Int("n", 100, "most `tokens` to add to a text")
	temperature := flag.Float64("temperature", 0, "how random a token is; 0: the most likely one")
	seed := flag.Uint64("seed", 1, "`number` that chooses the random numbers")
	flag.Parse()
	var files fs.FS = tiny.Files
	if *dir != "" {
		files = os.DirFS(*dir)
	}
	texts, err := write(files, prompts, *most, nn.Choice{Temperature: *temperature, TopK: 50}, *seed)
	if err != nil {
		log.Fatal(err)
	}
	for i, text := range texts {
		fmt.Printf("%s%s\n", prompts[i], text)
	}
}

// write returns what prompts go on with, up to n tokens each.
func write(files fs.FS, prompts []string, n int, choice nn.Choice, seed uint64) (texts []string, err error) {
	opened, err := decoder.OpenFS("the model", files)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, opened.Close()) }()
	const rows = 64 // most tokens of a step
	m, err := newModel(opened, rows, len(prompts), len(prompts)*opened.Network().Sizes().Context)
	defer func() { err = errors.Join(err, m.close()) }()
	if err != nil {
		return nil, err
	}
	ids, tokens := make([][]int, len(prompts)), opened.Tokenizer()
	for i, p := range prompts {
		if ids[i], err = tokens.Encode(p, tokenizer.Options{}); err != nil {
			return nil, err
		}
	}
	next, err := m.generate(ids, n, tokens.EOS(), choice, seed)
	for _, ids := range next {
		texts = append(texts, tokens.Decode(ids))
	}
	return texts, err
}

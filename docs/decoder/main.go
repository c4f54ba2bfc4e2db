// Command decoder is the decoder of docs/decoder.md: it goes on with its arguments,
// each of which is a prompt.
//
//	go run gorgonia.org/leanattention/docs/decoder "Once upon a time" "Question:"
package main

import (
	"fmt"
	"log"
	"os"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
)

func main() {
	prompts := os.Args[1:]
	if len(prompts) == 0 {
		prompts = []string{"Once upon a time"}
	}
	texts, err := write(prompts, 40, nn.Choice{Temperature: 0.8, TopK: 50}, 1)
	if err != nil {
		log.Fatal(err)
	}
	for i, t := range texts {
		fmt.Printf("%s%s\n", prompts[i], t)
	}
}

// write goes on with prompts by up to n tokens.
func write(prompts []string, n int, choice nn.Choice, seed uint64) ([]string, error) {
	folder, err := hf.OpenFS("tiny", tiny.Files)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	tokens, err := newTokenizer()
	if err != nil {
		return nil, err
	}
	d, err := newDecoder(folder, 32, len(prompts), 2048)
	if err != nil {
		return nil, err
	}
	defer d.close()

	ids := make([][]int, len(prompts))
	for i, p := range prompts {
		if ids[i], err = tokens.Encode(p, tokenizer.Options{}); err != nil {
			return nil, err
		}
	}
	next, err := d.generate(ids, n, tokens.EOS(), choice, seed)
	if err != nil {
		return nil, err
	}
	texts := make([]string, len(next))
	for i, ids := range next {
		texts[i] = tokens.Decode(ids)
	}
	return texts, nil
}

func newTokenizer() (*tokenizer.Tokenizer, error) {
	vocab, err := tiny.Files.Open("vocab.json")
	if err != nil {
		return nil, err
	}
	defer vocab.Close()
	merges, err := tiny.Files.Open("merges.txt")
	if err != nil {
		return nil, err
	}
	defer merges.Close()
	return tokenizer.New(vocab, merges)
}

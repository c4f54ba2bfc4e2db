// Command llama continues a text with a model of Llama's shape, by a graph that is written by hand: model.go. The folder has
// config.json, the weights and the tokenizer, as on Hugging Face.
//
//	go run ./examples/llama -model SmolLM2-135M -prompt "Once upon a time"
//
// The program is short enough to be copied. Command leanlm runs all models of package decoder, also on GPUs.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"slices"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

func main() {
	dir := flag.String("model", "", "`folder` of the model")
	prompt := flag.String("prompt", "Once upon a time", "`text` to continue")
	most := flag.Int("n", 100, "most `tokens` to add")
	flag.Parse()
	if *dir == "" {
		log.Fatal("-model is needed: the folder of a model")
	}
	if err := run(*dir, *prompt, *most, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run writes a prompt and its most likely continuation.
func run(dir, prompt string, most int, out io.Writer) (err error) {
	files, err := decoder.Open(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	ids, err := files.Tokenizer().Encode(prompt, tokenizer.Options{})
	if err != nil {
		return err
	}
	c, err := readConfig(dir)
	if err != nil {
		return err
	}
	m, err := newModel(c, files.Weights(), len(ids)+most)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()

	fmt.Fprint(out, prompt)
	pieces := files.Tokenizer().NewDecoder() // a character may have several tokens
	for range most {
		next, err := m.append(ids)
		if err != nil {
			return err
		}
		if slices.Contains(files.Ends(), next) {
			break
		}
		fmt.Fprint(out, pieces.Add(next))
		ids = []int{next}
	}
	_, err = fmt.Fprintln(out, pieces.Flush())
	return err
}

# docker build -t lockstep . && docker run --rm -v ./outputs:/lockstep/outputs lockstep python src/train.py
FROM python:3.11-slim
WORKDIR /lockstep
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY conf conf
COPY src src
CMD ["python", "src/train.py"]
